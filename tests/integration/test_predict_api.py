"""The contract of `/predict`."""

import base64
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from support.agent_service import PLAN, Service, bundle, image, serving
from support.api import problem_of

from client_agent.serving.candidates import Base, Member, single
from client_agent.serving.model import AS_SERVED, Recipe, View, build
from client_agent.settings import ServeOptions
from client_agent.web import serve
from shared.learning.runtime import Runtime


@pytest.fixture
def service() -> Iterator[Service]:
    one = Service(ServeOptions(), bundle())
    yield one
    one.queue.stop()


def expected(number: int = 3, seed: int = 0, use_offset: bool = True) -> list[float]:
    from client_agent.data.images import PREDICT_FORMATS, decode, to_tensor

    model = build(PLAN, "site", bundle(number), Runtime())
    tensor = to_tensor(decode(image(seed), PREDICT_FORMATS), PLAN.image)[None]
    return model.predict(tensor, View(use_offset))[0].tolist()


def test_a_raw_png_is_answered_with_the_contracts_fields(service: Service) -> None:
    answer = service.predict(image(), params={"top_k": 2})
    assert answer.status_code == 200
    body = answer.json()
    assert set(body) == {"model", "predictions", "request_id"}
    about = {"candidate", "candidate_digest", "members", "mixed", "prior", "temperature"}
    assert set(body["model"]) == {"federation", "round", "digest", "offset_digest", *about}
    assert (body["model"]["federation"], body["model"]["round"]) == ("pets", 3)
    assert body["model"]["digest"] == bundle().digest
    (one,) = body["predictions"]
    assert list(one) == ["index", "label", "class_id", "probability", "top_k"]
    probabilities = expected()
    best = int(np.argmax(probabilities))
    assert (one["index"], one["class_id"], one["label"]) == (0, best, PLAN.classes[best])
    assert one["probability"] == pytest.approx(probabilities[best], abs=1e-6)
    assert [entry["probability"] for entry in one["top_k"]] == pytest.approx(sorted(probabilities)[::-1][:2], abs=1e-6)


def test_the_three_forms_of_a_request_agree(service: Service) -> None:
    files = [image(seed) for seed in range(3)]
    raw = [service.predict(file).json()["predictions"][0]["probability"] for file in files]
    form = service.http.post("/predict", files=[("images", (f"{n}.png", file)) for n, file in enumerate(files)])
    texts = [base64.b64encode(file).decode() for file in files]
    plain = service.http.post("/predict", json={"images": texts})
    for answer in (form, plain):
        assert answer.status_code == 200, answer.text
        predictions = answer.json()["predictions"]
        assert [one["index"] for one in predictions] == [0, 1, 2]
        assert [one["probability"] for one in predictions] == pytest.approx(raw, abs=1e-5)


def test_jpeg_is_accepted(service: Service) -> None:
    assert service.predict(image(kind="JPEG"), "image/jpeg").status_code == 200


def test_three_classes_are_listed_by_default_and_at_most_all(service: Service) -> None:
    assert len(service.predict(image()).json()["predictions"][0]["top_k"]) == 3
    assert len(service.predict(image(), params={"top_k": 1000}).json()["predictions"][0]["top_k"]) == 4


def test_the_callers_request_id_is_returned(service: Service) -> None:
    answer = service.http.post(
        "/predict", content=image(), headers={"content-type": "image/png", "x-request-id": "abc"}
    )
    assert answer.json()["request_id"] == "abc"


PNG = image()
RAW: dict[str, Any] = {"content": PNG, "headers": {"content-type": "image/png"}}
BAD: dict[str, tuple[int, str, dict[str, Any]]] = {
    "truncated": (400, "undecodable-image", {"content": PNG[:100], "headers": {"content-type": "image/png"}}),
    "empty": (400, "undecodable-image", {"content": b"", "headers": {"content-type": "image/png"}}),
    "svg as png": (400, "undecodable-image", {"content": b"<svg/>", "headers": {"content-type": "image/png"}}),
    "svg": (415, "unsupported-type", {"content": b"<svg/>", "headers": {"content-type": "image/svg+xml"}}),
    "no type": (415, "unsupported-type", {"content": PNG}),
    "33 files": (422, "image-count", {"files": [("images", (f"{n}.png", PNG)) for n in range(33)]}),
    "no files": (422, "image-count", {"json": {"images": []}}),
    "another field": (422, "image-count", {"files": [("pictures", ("a.png", PNG))]}),
    "not base64": (400, "undecodable-image", {"json": {"images": ["!!!"]}}),
    "not the json": (422, "invalid-json", {"json": {"image": "x"}}),
    "broken json": (422, "invalid-json", {"content": b"{", "headers": {"content-type": "application/json"}}),
    "broken form": (
        422,
        "invalid-form",
        {"content": b"nonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}},
    ),
    "no boundary": (422, "invalid-form", {"content": b"x", "headers": {"content-type": "multipart/form-data"}}),
    "top_k": (422, "invalid-parameters", RAW | {"params": {"top_k": 0}}),
    "offset": (422, "invalid-parameters", RAW | {"params": {"offset": "x"}}),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused_with_their_status(service: Service, case: str) -> None:
    status, code, options = BAD[case]
    answer = service.http.post("/predict", **options)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    assert answer.json()["code"] == code


def test_one_bad_image_among_good_ones_names_its_index_and_predicts_nothing(service: Service) -> None:
    files = [("images", ("a.png", image())), ("images", ("b.png", b"broken")), ("images", ("c.png", image()))]
    answer = service.http.post("/predict", files=files)
    assert answer.status_code == 400
    assert "Image 1" in answer.json()["detail"]
    assert "predictions" not in answer.json()


def test_too_many_bytes_or_pixels_are_refused() -> None:
    one = Service(ServeOptions(max_body_bytes=2000, max_pixels=200), bundle())
    assert one.predict(bytes(3000)).status_code == 413

    def chunks() -> Iterator[bytes]:
        yield from [bytes(1000)] * 3

    assert one.http.post("/predict", content=chunks(), headers={"content-type": "image/png"}).status_code == 413
    answer = one.predict(image())
    assert problem_of(answer) == (413, "too-many-pixels")
    one.queue.stop()


def test_predict_answers_503_until_the_first_model() -> None:
    one = Service(ServeOptions(), None)
    answer = one.predict(image())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert one.http.get("/readyz").status_code == 503
    assert one.http.get("/healthz").status_code == 200
    one.queue.stop()


def test_the_token_is_required_if_there_is_one() -> None:
    one = Service(ServeOptions(token="let-me-in"), bundle())
    assert one.predict(image()).status_code == 401
    assert one.http.get("/info").status_code == 401
    assert one.http.get("/metrics").status_code == 401
    headers = {"content-type": "image/png", "authorization": "Bearer let-me-in"}
    assert one.http.post("/predict", content=image(), headers=headers).status_code == 200
    one.queue.stop()


def test_a_misspelled_parameter_is_refused_and_the_right_one_named(service: Service) -> None:
    answer = service.predict(image(), params={"topk": 3, "top_k": 2})
    assert problem_of(answer) == (422, "invalid-parameters")
    assert answer.json()["detail"] == "topk: unknown parameter; did you mean top_k?"
    assert service.predict(image(), params={"colour": 1}).json()["detail"].endswith("takes top_k, offset, prior")


def test_the_root_describes_the_service_and_links_to_the_calls(service: Service) -> None:
    answer = service.http.get("/").json()
    assert (answer["service"], answer["federation"], answer["model"]) == ("DisTrans agent", "pets", 3)
    assert set(answer["links"]) == {"predict", "info", "docs"}
    document = service.http.get("/openapi.json").json()
    for link in answer["links"].values():
        assert link in document["paths"] or service.http.get(link).status_code == 200
    closed = Service(ServeOptions(token="secret"), None)
    assert closed.http.get("/").status_code == 401
    assert closed.http.get("/", headers={"Authorization": "Bearer secret"}).json()["model"] is None
    closed.queue.stop()
    assert service.http.get("/", headers={"Host": "evil.example"}).status_code == 421


@pytest.mark.parametrize("path", ["/predict/", "/info/", "/docs/"])
def test_a_trailing_slash_is_not_redirected(service: Service, path: str) -> None:
    answer = service.http.get(path, follow_redirects=False)
    assert problem_of(answer) == (404, "not-found")
    assert answer.json()["next_step"] == "Remove the trailing slash."


def test_the_offset_can_be_disabled_only_if_the_agent_allows_it(service: Service) -> None:
    assert service.predict(image(), params={"offset": "none"}).status_code == 403
    one = Service(ServeOptions(allow_offset_override=True), bundle())
    bare = one.predict(image(), params={"offset": "none", "top_k": 4}).json()
    both = one.predict(image(), params={"offset": "both", "top_k": 4}).json()
    assert bare["model"]["offset_digest"] is None
    by_class = {entry["class_id"]: entry["probability"] for entry in bare["predictions"][0]["top_k"]}
    assert [by_class[place] for place in range(4)] == pytest.approx(expected(use_offset=False), abs=1e-6)
    assert both["without_offset"] == bare["predictions"]
    assert both["predictions"] == service.predict(image(), params={"top_k": 4}).json()["predictions"]
    one.queue.stop()


def probabilities(answer: Any) -> list[float]:
    by_class = {entry["class_id"]: entry["probability"] for entry in answer["predictions"][0]["top_k"]}
    return [by_class[place] for place in range(len(PLAN.classes))]


def test_the_prior_can_be_chosen_and_the_answer_says_which(service: Service) -> None:
    """The site has cats only; the federation has all four classes alike."""
    counted = replace(bundle(), facts=bundle().facts | {"class_totals": "50,50,50,50"})
    recipe = Recipe(single(Member(Base.OFFSET, uses_prior=True)), 2.0, (96, 0, 0, 0), record="r" * 64)
    service.queue.model = build(PLAN, "site", counted, Runtime(), recipe)
    site, same, none = (
        service.predict(image(), params={"top_k": 4, **chosen}).json()
        for chosen in ({}, {"prior": "site"}, {"prior": "none"})
    )
    assert site["model"]["candidate"] == "offset+prior"
    assert site["model"]["candidate_digest"] == "r" * 64
    assert site["model"]["members"] == [{"base": "offset", "weight": 1.0}]
    assert (site["model"]["prior"], none["model"]["prior"]) == ("site", "none")
    assert site["model"]["temperature"] == 2.0
    assert same["predictions"] == site["predictions"]
    plain, shift = expected(), [0.97, 0.01, 0.01, 0.01]  # with one imaginary image per class
    calibrated = [[one**0.5 for one in found] for found in (plain, [a * b for a, b in zip(plain, shift, strict=True)])]
    for answer, found in zip((none, site), calibrated, strict=True):
        assert probabilities(answer) == pytest.approx([one / sum(found) for one in found], abs=1e-5)
    assert service.predict(image(), params={"prior": "deployment"}).status_code == 422


def test_without_class_counts_no_prior_is_applied(service: Service) -> None:
    answer = service.predict(image(), params={"prior": "site", "top_k": 4}).json()
    assert answer["model"]["prior"] is None
    assert probabilities(answer) == pytest.approx(expected(), abs=1e-6)


def test_a_full_queue_is_reported_at_once() -> None:
    """The computing thread is blocked until the queue is full; then the waiting requests are answered."""
    one = Service(ServeOptions(queue=2), bundle())
    entered, release = threading.Event(), threading.Event()
    model = one.queue.model
    assert model is not None

    def slow(images: torch.Tensor) -> torch.Tensor:
        entered.set()
        release.wait(30)
        return model.predictors[Base.OFFSET](images)

    one.queue.model = serving(slow)
    first = one.queue.submit(lambda: torch.zeros(1, 1, 16, 16))
    assert entered.wait(30)
    second = one.queue.submit(lambda: torch.zeros(3, 1, 16, 16), AS_SERVED, View(use_offset=False))
    answer = one.predict(image())
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    release.set()
    shapes = [part.shape for job in (first, second) for part in job.result(30).probabilities.values()]
    assert shapes == [(1, 4), (3, 4), (3, 4)]
    assert one.queue.submit(lambda: torch.zeros(1, 1, 16, 16)).result(30).model is one.queue.model
    one.queue.stop()


def test_an_error_in_the_network_fails_the_request_but_not_the_service(service: Service) -> None:
    def broken(_images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    good = service.queue.model
    service.queue.model = serving(broken)
    unraised = TestClient(service.app, "http://127.0.0.1", raise_server_exceptions=False)
    assert unraised.post("/predict", content=image(), headers={"content-type": "image/png"}).status_code == 500
    service.queue.model = good
    assert service.predict(image()).status_code == 200


def test_a_model_with_non_finite_answers_is_never_served() -> None:
    broken = bundle()
    broken.shared["logits.bias"][0] = float("nan")
    with pytest.raises(Exception, match="finite"):
        build(PLAN, "site", broken, Runtime())


def test_swapping_models_neither_mixes_answers_nor_fails_requests(service: Service) -> None:
    """2,000 calls over eight connections while models are swapped: each answer comes from exactly one model."""
    models = {number: build(PLAN, "site", bundle(number), Runtime()) for number in range(4)}
    truth = {(model.key.digest, model.offset_digest): expected(number) for number, model in models.items()}
    assert len(truth) == 4
    over, answers = threading.Event(), []

    def swap() -> None:
        number = 0
        while not over.wait(0.001):
            number += 1
            service.queue.model = models[number % 4]

    def call(port: int) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        for _ in range(250):
            connection.request("POST", "/predict?top_k=4", PNG, {"content-type": "image/png"})
            answer = connection.getresponse()
            answers.append((answer.status, answer.read()))
        connection.close()

    service.queue.model = models[0]
    with serve.web_server(service.app, ServeOptions(port=0)) as port:
        threads = [threading.Thread(target=call, args=(port,)) for _ in range(8)]
        swapper = threading.Thread(target=swap)
        for thread in (*threads, swapper):
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        swapper.join()
    assert [status for status, _ in answers] == [200] * 2000
    bodies = [json.loads(body) for _, body in answers]
    for body in bodies:
        probabilities = truth[body["model"]["digest"], body["model"]["offset_digest"]]
        found = {entry["class_id"]: entry["probability"] for entry in body["predictions"][0]["top_k"]}
        assert [found[place] for place in range(4)] == pytest.approx(probabilities, abs=1e-5)
    assert {body["model"]["round"] for body in bodies} == {0, 1, 2, 3}


def test_metrics_and_info_are_served(service: Service) -> None:
    service.predict(image())
    text = service.http.get("/metrics").text
    assert "distrans_agent_images_total 1.0" in text
    assert "distrans_agent_model 3.0" in text
    assert service.http.get("/info").json() == {"agent": "me"}
    assert service.http.get("/readyz").json() == {"status": "ready", "round": 3}


def test_the_docs_page_needs_no_other_host(service: Service) -> None:
    page = service.http.get("/docs")
    assert (page.status_code, "//" in re.sub(r"<!--.*?-->", "", page.text)) == (200, False)
    for asset in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert service.http.get(asset).status_code == 200
