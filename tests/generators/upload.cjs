// Upload a file with tus-js-client in one of its IETF modes: `node upload.cjs URL TOKEN FILE PROTOCOL PART_BYTES STOP_AFTER`.
// With STOP_AFTER > 0 the upload is aborted after that many bytes and resumed by another client object.
const fs = require("node:fs");
const tus = require("tus-js-client");

const [url, token, file, protocol, partBytes, stopAfter] = process.argv.slice(2);
const body = fs.readFileSync(file);
const common = {
    protocol,
    chunkSize: Number(partBytes) || Infinity,
    headers: { Authorization: `Bearer ${token}` },
    retryDelays: null,
    onError: (error) => { console.error(String(error)); process.exit(1); },
    onSuccess: ({ lastResponse }) => console.log(lastResponse.getStatus(), lastResponse.getBody()),
};

const first = new tus.Upload(body, {
    ...common,
    endpoint: url,
    onChunkComplete: async (_size, accepted) => {
        if (Number(stopAfter) === 0 || accepted < Number(stopAfter)) return;
        await first.abort();
        new tus.Upload(body, { ...common, uploadUrl: first.url }).start();
    },
});
first.start();
