"""The report as a browser shows it: nothing from outside, true numbers, working switches, harmless names."""

import csv
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Browser, Page

import equipoise as eq
from equipoise.config.experiment import Experiment
from equipoise.reporting import html as pages
from equipoise.reporting.html.chart import plain
from equipoise.reporting.html.clients import Clients
from equipoise.runs.launch import run
from equipoise.storage.run_folder import RunFolder
from equipoise.storage.run_index import find_runs
from tests.support.browser import open_page
from tests.support.commands import equipoise_command, small
from tests.support.problems import small_mlp

HOSTILE = "<img src=x onerror=alert(1)></script><b>&amp;'\"%{x}$"


def own_clients(clients: int = 6) -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    parts = []
    for i in range(clients):
        x = rng.normal(size=(30, 5)).astype("float32")
        y = (x @ rng.normal(size=(5, 3))).argmax(1)
        parts.append(
            {"train": (x[:14], y[:14]), "validation": (x[14:20], y[14:20]), "test": (x[20 + i % 3 :], y[20 + i % 3 :])}
        )
    return parts


def train(out: Path, algorithm: Any, **more: Any) -> None:
    names = [f"{HOSTILE} {i}" for i in range(6)]
    more = {"rounds": 3, "names": names, "participation": 1.0, **more}
    eq.train(small_mlp(), own_clients(), algorithm, out=out, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, one of them with two seeds, two of them under attack too; all names are hostile."""
    folder = tmp_path_factory.mktemp("page") / HOSTILE.replace("/", "|")
    for seed in (0, 1):
        train(folder / f"ditto{seed}", eq.Ditto(lr=0.1, batch=5), seed=seed)
    train(folder / "fedavg", eq.FedAvg(lr=0.1, batch=5))
    train(folder / "local", eq.Local(lr=0.1, batch=5))
    for fraction in (0.2, 0.4):
        attack = eq.SignFlip(fraction=fraction)
        train(folder / f"ditto-{fraction}", eq.Ditto(lr=0.1, batch=5), attack=attack)
    train(folder / "ditto-median", eq.Ditto(lr=0.1, batch=5), attack=eq.SignFlip(fraction=0.4), reducer="median")
    return folder


@pytest.fixture(scope="module")
def report(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "report.html"
    done = equipoise_command("report", folder, "--out", out, "--title", HOSTILE, cwd=out.parent)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def page(chromium: Browser, report: Path) -> Iterator[Page]:
    opened = open_page(chromium, report)
    yield opened.page
    opened.page.context.close()


def drawn(page: Page) -> list[dict[str, Any]]:
    """The charts as plotly.js has them now."""
    return page.evaluate(
        "[...document.querySelectorAll('.plot')].map(p => ({id: p.dataset.chart,"
        " drawn: !!p.querySelector('svg.main-svg'),"
        " traces: p.data.map(t => ({name: t.name, meta: t.meta || {}, type: t.type, x: t.x, y: t.y, visible: t.visible,"
        " skip: t.hoverinfo === 'skip'}))}))"
    )


def chart(page: Page, id: str) -> list[dict[str, Any]]:
    [found] = [c for c in drawn(page) if c["id"] == id]
    return found["traces"]


def method_number(page: Page, name: str) -> int:
    row = page.locator("#figures-table tbody tr").filter(has=page.get_by_role("rowheader", name=name, exact=True)).first
    return int(row.get_attribute("data-method") or "")


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (375, "dark")])
def test_it_loads_without_errors_or_requests_and_fits(
    chromium: Browser,
    report: Path,
    width: int,
    scheme: str,
) -> None:
    opened = open_page(chromium, report, width, 800, scheme)
    page = opened.page
    assert opened.errors == []
    assert opened.requests == [report.as_uri()]
    charts = drawn(page)
    assert all(each["drawn"] for each in charts)
    buttons = page.evaluate("[...new Set([...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title))]")
    assert set(buttons) == {"Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}
    expected = {"scores", "pooled", "losses", "bytes", "clients", "distribution", "fairness", "federation"}
    assert {each["id"] for each in charts} == expected | {"attack-sign-flip-0"}
    # Nothing but wide tables moves sideways, on a phone too.
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert dark == (scheme == "dark")
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_that_shuts_people_out(chromium: Browser, report: Path, scheme: str) -> None:
    page = open_page(chromium, report, scheme=scheme).page
    found = Axe().run(page).response["violations"]
    assert [(v["id"], [n["html"][:120] for n in v["nodes"]][:2]) for v in found] == []
    page.context.close()


def test_hostile_names_are_shown_and_do_nothing(page: Page, folder: Path) -> None:
    assert page.title() == HOSTILE
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.locator("img").count() == 0
    texts = next(t for t in page.evaluate("document.querySelector('[data-chart=clients]').data.map(t => t.text)") if t)
    assert texts[0] == plain(f"{HOSTILE} 0")
    # With its tags as text, in what is shown over a point as well.
    page.evaluate("Plotly.Fx.hover(document.querySelector('[data-chart=clients]'), [{curveNumber: 0, pointNumber: 0}])")
    assert "<img src=x" in (page.locator("[data-chart=clients] .hoverlayer").text_content() or "")
    page.locator("[data-chart=federation]").locator("xpath=../details/summary").click()
    assert HOSTILE in page.locator("[data-chart=federation]").locator("xpath=..").locator("details table").inner_text()


def test_switches_hide_methods_and_kinds_everywhere(page: Page) -> None:
    number = method_number(page, "ditto")
    before = drawn(page)
    assert all(t["visible"] for each in before for t in each["traces"])
    box = page.locator(f"fieldset.methods:not([hidden]) input[value='{number}']")
    box.focus()
    page.keyboard.press("Space")
    for each in drawn(page):
        for trace in each["traces"]:
            assert trace["visible"] == (trace["meta"].get("method") != number), (each["id"], trace["name"])
    assert "off" in (page.locator(f"tr[data-method='{number}']").first.get_attribute("class") or "")
    box.check()
    page.locator("input[name=kind][value=global]").uncheck()
    for each in drawn(page):
        assert all(t["visible"] == (t["meta"].get("kind") != "global") for t in each["traces"]), each["id"]
    page.locator("input[name=kind][value=global]").check()
    page.locator("fieldset.methods:not([hidden]) .none").click()
    shown = [t["visible"] for t in chart(page, "scores")]
    assert shown
    assert not any(shown)
    page.locator("fieldset.methods:not([hidden]) .all").click()
    assert drawn(page) == before


def summaries(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [json.loads((folder / name / "summary.json").read_text()) for name in names]


def test_the_numbers_are_those_of_the_summaries(page: Page, folder: Path) -> None:
    number = method_number(page, "ditto")
    cells = page.evaluate(
        "n => Object.fromEntries([...document.querySelector(`tr[data-method='${n}']`).cells]"
        ".filter(c => c.dataset.name).map(c => [c.dataset.name, [c.dataset.value, c.textContent]]))",
        number,
    )
    both = summaries(folder, "ditto0", "ditto1")
    for kind in ("personal", "global", "hybrid"):
        values = [s[kind]["accuracy"] for s in both]
        assert float(cells[kind][0]) == pytest.approx(np.mean(values), abs=1e-12)
        assert cells[kind][1] == f"{100 * np.mean(values):.2f} ± {100 * np.std(values, ddof=1):.2f}"
        [curve] = [t for t in chart(page, "scores") if t["meta"] == {"method": number, "kind": kind} and not t["skip"]]
        assert curve["y"][-1] == pytest.approx(100 * np.mean(values), abs=1e-9)
        [loss] = [t for t in chart(page, "losses") if t["meta"] == {"method": number, "kind": kind} and not t["skip"]]
        assert loss["y"][-1] == pytest.approx(np.mean([s[kind]["loss"] for s in both]), abs=1e-9)
        sent = np.mean([s["bytes_up"] + s["bytes_down"] for s in both]) / 1e6
        [moved] = [t for t in chart(page, "bytes") if t["meta"] == {"method": number, "kind": kind} and not t["skip"]]
        assert moved["x"][-1] == pytest.approx(sent, abs=1e-12)
    assert float(cells["worst tenth"][0]) == pytest.approx(np.mean([s["personal"]["worst_decile"] for s in both]))
    assert float(cells["seconds"][0]) == pytest.approx(np.mean([s["seconds"] for s in both]))
    with (folder / "fedavg" / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    [box] = [
        t
        for t in chart(page, "distribution")
        if t["meta"] == {"method": method_number(page, "fedavg"), "kind": "global"} and t["type"] == "box"
    ]
    assert box["x"] == pytest.approx([100 * float(row["global_test_metric"]) for row in rows])
    attacked = summaries(folder, "ditto-0.2", "ditto-0.4")
    [curve] = [t for t in chart(page, "attack-sign-flip-0") if t["name"] == "ditto (global)"]
    assert curve["x"] == [0.0, pytest.approx(1 / 6), pytest.approx(2 / 6)]
    assert curve["y"][1:] == pytest.approx([100 * s["global"]["accuracy"] for s in attacked])


def test_the_table_sorts_and_what_is_missing_stands_last(page: Page) -> None:
    column = page.locator("#figures-table thead button").filter(has_text=re.compile("^global$"))

    def values() -> list[str]:
        return page.evaluate("[...document.querySelectorAll('td[data-name=global]')].map(c => c.dataset.value)")

    for order, reverse in (("ascending", False), ("descending", True)):
        column.press("Enter")
        assert column.locator("xpath=..").get_attribute("aria-sort") == order
        found = values()
        numbers = [float(v) for v in found if v]
        assert found[-1] == ""  # local training has no global model
        assert numbers == sorted(numbers, reverse=reverse)
        assert "" not in found[: len(numbers)]


def test_problems_are_chosen_among_and_keep_what_is_switched_off(page: Page) -> None:
    number = method_number(page, "ditto")
    page.locator(f"fieldset.methods:not([hidden]) input[value='{number}']").uncheck()
    page.get_by_label("Problem").select_option(index=1)
    page.wait_for_function("document.querySelectorAll('#drawn .plot svg.main-svg').length > 0")
    mine = [t for t in chart(page, "scores") if t["meta"]["method"] == number]
    assert not any(t["visible"] for t in mine)


def test_printed_it_is_light_and_without_controls(chromium: Browser, report: Path) -> None:
    page = open_page(chromium, report, scheme="dark").page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert page.locator("#figures-table").is_visible()
    assert page.pdf().startswith(b"%PDF")
    page.context.close()


@pytest.mark.slow
@given(
    st.recursive(st.none() | st.text() | st.floats(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_what_is_embedded_cannot_leave_its_element(value: Any) -> None:
    text = pages.embedded(value)
    assert not set("<>&") & set(text)
    again = json.loads(text)
    if isinstance(value, str):
        assert again == value


def cells_of(page: Path, name: str) -> list[str]:
    return re.findall(rf'data-name="{name}">([^<]*)<', page.read_text())


def test_errors_and_clients_that_took_no_part_are_in_the_table_with_deviations(tmp_path: Path) -> None:
    for seed in (0, 1):
        tables = small(seed=seed, data={"clients": 6, "unseen": 0.4})
        run(Experiment.parse(tables), tmp_path / "runs" / str(seed))
    done = equipoise_command("report", "runs", "--out", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    both = summaries(tmp_path / "runs", "0", "1")
    for name, values in (
        ("personal", [s["personal"]["rmse"] for s in both]),
        ("unseen", [s["unseen"]["personal"]["rmse"] for s in both]),
    ):
        assert cells_of(tmp_path / "page.html", name) == [f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"]


@pytest.mark.slow
def test_attacks_on_several_data_sets_have_charts_of_their_own_and_methods_lines(tmp_path: Path) -> None:
    for clients in (6, 5):
        for fraction in (0.0, 0.4):
            for lam in (0.1, 1.0):
                attack = {"attack": eq.SignFlip(fraction=fraction)} if fraction else {}
                out = tmp_path / f"{clients}-{fraction}-{lam}"
                eq.train(small_mlp(), own_clients(clients), eq.Ditto(lam=lam, lr=0.1), rounds=1, out=out, **attack)
    methods = [method for scene in pages.scenes(find_runs([tmp_path])) for method in scene.methods]
    charts = pages.curves.attacks(methods)
    assert len(charts) == 2
    for each in charts:
        globals_ = [t for t in each["data"] if t["meta"]["kind"] == "global"]
        assert len(globals_) == 2
        assert all(len(t["x"]) == 2 and t["x"][0] == 0 < t["x"][1] for t in globals_)
        assert len({t["meta"]["method"] for t in globals_}) == 2


def test_methods_that_differ_in_anything_have_names_of_their_own(tmp_path: Path) -> None:
    train(tmp_path / "single", eq.FedAvg(lr=0.1), rounds=1)
    train(tmp_path / "double", eq.FedAvg(lr=0.1), rounds=1, precision="float64")
    [scene] = pages.scenes(find_runs([tmp_path]))
    names = [method.name for method in scene.methods]
    assert sorted(names) == ["fedavg engine.precision=float32", "fedavg engine.precision=float64"]
    assert len({method.number for method in scene.methods}) == 2
    # How often it is scored makes no other method of it, unless that is all that tells two of them apart.
    train(tmp_path / "seldom", eq.FedAvg(lr=0.1), rounds=1, evaluate_every=5, seed=1, precision="float64")
    [scene] = pages.scenes(find_runs([tmp_path]))
    assert len({method.name for method in scene.methods}) == 3


def test_metrics_of_ones_own_are_charts_of_their_own_and_know_what_is_better(tmp_path: Path) -> None:
    def hit(output: Any, target: Any) -> Any:
        return (output.argmax(-1) == target).to(output.dtype)

    train(tmp_path / "a", eq.Ditto(lr=0.1), rounds=1)
    train(tmp_path / "b", eq.Ditto(lr=0.1), rounds=1, metric=eq.Metric("hits", hit, higher_is_better=True))
    train(tmp_path / "c", eq.Ditto(lr=0.1), rounds=1, metric=eq.Metric("misses", hit, higher_is_better=False))
    [scene] = pages.scenes(find_runs([tmp_path]))
    charts = {each["id"]: each for each in pages.drawn(scene, Clients())}
    assert {"scores-accuracy", "scores-hits", "scores-misses"} <= charts.keys()
    assert "Above the line" in charts["clients-hits"]["note"]
    assert "Below the line" in charts["clients-misses"]["note"]
    assert "Lower left" in charts["fairness-misses"]["note"]


@pytest.mark.parametrize("name", ["summary.json", "federation.json", "metrics.jsonl", "cka.json", "paper.json"])
def test_a_damaged_file_is_named_in_a_sentence(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "fedavg", tmp_path / "run")
    (tmp_path / "run" / name).write_text('{"half\n')
    done = equipoise_command("report", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert f"{name} is damaged" in done.stderr
    assert "Traceback" not in done.stderr


def test_runs_at_several_depths_are_all_found(folder: Path, tmp_path: Path) -> None:
    for place in ("near", "paper/file/far", "near/checkpoint/not-a-run"):
        shutil.copytree(folder / "local", tmp_path / place, dirs_exist_ok=True)
    assert [run.path.relative_to(tmp_path) for run in find_runs([tmp_path])] == [Path("near"), Path("paper/file/far")]


def test_an_unfinished_run_is_left_out_and_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("fedavg", "local"):
        (tmp_path / "runs" / name).symlink_to(folder / name)
    half = tmp_path / "runs" / "half"
    half.mkdir()
    (half / "run.toml").write_text((folder / "local" / "run.toml").read_text())
    done = equipoise_command("report", "runs", cwd=tmp_path)
    assert done.returncode == 0
    assert "unfinished runs skipped: 1" in done.stderr
    assert "unfinished runs skipped: 1" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "there is no folder nothing"),
        (["."], "holds no run"),
        ([".", "--out", "page.pdf"], "--out page.pdf is not allowed; the page is an HTML file"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = equipoise_command("report", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_heat_maps_of_what_is_shared_and_of_similar_layers_are_those_of_the_folders(tmp_path: Path) -> None:
    train(tmp_path / "run", eq.FedAvg(lr=0.1, batch=5))
    cka = {"cka": [[1.0, 0.5]], "pairs": ["a", "b"], "layers": ["<b>"], "between": "x", "rounds": 3, "samples": 9}
    (tmp_path / "run" / "cka.json").write_text(json.dumps(cka))
    lam = np.array([[0.1, 10.0], [1.0, 100.0]], dtype="float32")
    from safetensors.numpy import save_file

    save_file({"lam": lam}, RunFolder(tmp_path / "run").shown)
    [scene] = pages.scenes(find_runs([tmp_path / "run"]))
    charts = {chart["id"]: chart for chart in pages.drawn(scene, Clients())}
    np.testing.assert_allclose(charts["learned-0"]["data"][0]["z"], [[-1, 1], [0, 2]], atol=1e-6)
    assert charts["cka-0"]["data"][0]["z"] == [[1.0, 0.5]]
    assert charts["cka-0"]["data"][0]["y"] == ["&lt;b&gt;"]


def test_runs_that_differ_in_the_data_are_problems_of_their_own_and_seeds_are_not(folder: Path) -> None:
    found = pages.scenes(find_runs([folder]))
    assert sorted(len(scene.methods) for scene in found) == [1, 2, 3]
    by_name = {m.name: m for m in found[0].methods}
    assert len(by_name["ditto"].runs) == 2
