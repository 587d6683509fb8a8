// Sends a form with files as soon as they are chosen or dropped on it, and shows the answer's `#results` in place, with
// a small picture of each file, which never leaves the browser again. Without this script, the form opens a page.
"use strict";

for (const form of document.querySelectorAll("form[data-drop]")) {
  const input = form.querySelector("input[type=file]");
  const results = document.getElementById("results");
  const pictureSide = 112;
  let sent = 0;

  const tell = (text, kind) => {
    const words = document.createElement("p");
    words.textContent = text;
    const alert = document.createElement("div");
    alert.className = `alert ${kind}`;
    alert.setAttribute("role", kind === "bad" ? "alert" : "status");
    alert.append(words);
    results.replaceChildren(alert);
  };

  const addPicture = async (place, file) => {
    const preview = document.createElement("div");
    preview.className = "preview";
    try {
      const bitmap = await createImageBitmap(file);
      const scale = Math.min(1, pictureSide / Math.max(bitmap.width, bitmap.height));
      const grown = scale === 1 ? Math.max(1, Math.floor(pictureSide / Math.max(bitmap.width, bitmap.height))) : scale;
      const canvas = document.createElement("canvas");
      canvas.width = Math.max(1, Math.round(bitmap.width * grown));
      canvas.height = Math.max(1, Math.round(bitmap.height * grown));
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", file.name);
      const context = canvas.getContext("2d");
      context.imageSmoothingEnabled = grown <= 1;
      context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
      bitmap.close();
      preview.append(canvas);
    } catch {
      // The answer says what is wrong with it.
    }
    const name = document.createElement("span");
    name.textContent = file.name;
    preview.append(name);
    place.prepend(preview);
  };

  const send = async (files) => {
    const most = Number(form.dataset.most);
    const bytes = files.reduce((sum, file) => sum + file.size, 0);
    if (!files.length) return;
    if (files.length > most) return tell(`${files.length} files are too many; at most ${most} at once.`, "bad");
    if (bytes > Number(form.dataset.maxBytes)) return tell("The files are too large to be sent at once.", "bad");
    const number = ++sent;
    const body = new FormData();
    for (const file of files) body.append(input.name, file);
    tell(files.length === 1 ? "Classifying the image …" : `Classifying ${files.length} images …`, "info");
    try {
      const answer = await fetch(form.action, { method: "POST", body, headers: { Accept: "text/html" } });
      if (answer.redirected) return location.assign(answer.url);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const found = page.getElementById("results");
      if (!found) throw new Error("no results");
      if (number !== sent) return; // newer files were sent meanwhile
      results.replaceChildren(...[...found.childNodes].map((node) => document.importNode(node, true)));
      await Promise.all(
        [...results.querySelectorAll("[data-image]")].map((place) => addPicture(place, files[Number(place.dataset.image)])),
      );
      results.focus({ preventScroll: true });
    } catch {
      if (number === sent) tell("The agent did not answer. Try again.", "bad");
    } finally {
      form.reset();
    }
  };

  form.querySelector("button").hidden = true; // choosing is enough
  input.addEventListener("change", () => send([...input.files]));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send([...input.files]);
  });
  for (const kind of ["dragenter", "dragover"]) {
    form.addEventListener(kind, (event) => {
      event.preventDefault();
      form.dataset.jsOver = "";
    });
  }
  form.addEventListener("dragleave", (event) => {
    if (!form.contains(event.relatedTarget)) delete form.dataset.jsOver;
  });
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    delete form.dataset.jsOver;
    send([...event.dataTransfer.files]);
  });
  // A file dropped next to the form must not replace the page.
  for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault());
}
