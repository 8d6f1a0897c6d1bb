"""The page in a real browser: headless Chromium, where there is one (Debian: chromium and chromium-driver)."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.serve.settings import Settings
from serve.conftest import Running, serving, wait_until

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService, Keys
from selenium.webdriver.common.by import By

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no Chromium with its driver")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = str(BROWSER)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    downloads = str(tmp_path_factory.mktemp("downloads"))
    options.add_experimental_option("prefs", {"download.default_directory": downloads})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(str(DRIVER)))
    driver.downloads = downloads  # type: ignore[attr-defined]
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(browser: Chrome, llms: dict[str, LLM]) -> Iterator[Chrome]:
    """The page behind a server, a prompt answered on it."""
    with serving(llms, Settings(rows=2, context=512, name="tiny")) as server:
        browser.get(server.url)
        wait_until(lambda: bool(browser.find_elements(By.CSS_SELECTOR, "#drafter option")))
        fill(browser, "prompt", "abcabcabc")
        fill(browser, "tokens", "30")
        answer(browser)
        yield browser
        severe = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]  # type: ignore[no-untyped-call]
        browser.get("about:blank")
    assert not severe


def at(browser: Chrome, name: str) -> Any:
    return browser.find_element(By.ID, name)


def fill(browser: Chrome, name: str, text: str) -> None:
    at(browser, name).clear()
    at(browser, name).send_keys(text)


def done(browser: Chrome) -> bool:
    return (
        str(at(browser, "error").text) == "" and browser.execute_script("return document.body.dataset.state") == "done"
    )


def answer(browser: Chrome) -> None:
    """Submit by the keyboard, as whoever cannot see a button."""
    browser.execute_script("document.body.dataset.state = ''")
    at(browser, "go").send_keys(Keys.ENTER)
    wait_until(lambda: done(browser))


def lanes(browser: Chrome) -> list[str]:
    return [str(lane.get_property("textContent")) for lane in browser.find_elements(By.CSS_SELECTOR, ".lane p")]


def test_an_answer(page: Chrome) -> None:
    first, plain = lanes(page)
    assert first == plain
    assert first
    assert "tokens/s" in page.find_element(By.CSS_SELECTOR, ".lane .speed").text
    assert page.find_elements(By.CSS_SELECTOR, ".token[class*=s0]")  # somebody's draft
    assert "target" in at(page, "legend").text
    hints = [token.get_attribute("title") for token in page.find_elements(By.CSS_SELECTOR, ".token")]
    assert any("refused" in (hint or "") for hint in hints)


def test_rounds_by_the_keyboard(page: Chrome) -> None:
    line = at(page, "timeline")
    bars = page.find_elements(By.CSS_SELECTOR, ".bar")
    line.send_keys(Keys.HOME)
    assert f"Round 1 of {len(bars)}" in at(page, "round").text
    line.send_keys(Keys.ARROW_RIGHT)
    assert "Round 2 of" in at(page, "round").text
    assert line.get_attribute("aria-activedescendant") == "round-1"
    assert page.find_elements(By.CSS_SELECTOR, "[aria-selected=true]") == [bars[1]]
    line.send_keys(Keys.END)
    line.send_keys(Keys.ARROW_RIGHT)  # there is nothing there
    assert f"Round {len(bars)} of" in at(page, "round").text
    assert page.find_elements(By.CSS_SELECTOR, "#tree li")


def test_what_a_screen_reader_is_told(page: Chrome) -> None:
    """All that can be operated has a name, and what changes is announced."""
    tree = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    told = [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in tree
        if not node.get("ignored") and "role" in node
    ]
    operated = {"button", "textbox", "combobox", "spinbutton", "checkbox", "listbox", "option"}
    assert not [role for role, name in told if role in operated and not name]
    assert {"Prompt", "Method", "Tokens", "Temperature", "Rounds"} <= {name for _, name in told}
    assert [role for role, _ in told].count("status") == 2
    assert "alert" in {role for role, _ in told}
    assert [name for role, name in told if role == "heading"][:2] == ["paceline", "Output"]


def test_everything_is_reached_by_tab(page: Chrome) -> None:
    # From the top, and not from what had the focus last, which Chromium goes on from even when it has lost it.
    page.execute_script("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    reached = []
    for _ in range(14):
        ActionChains(page).send_keys(Keys.TAB).perform()
        reached.append(str(page.execute_script("return document.activeElement.id")))
    wanted = ["prompt", "drafter", "tokens", "temperature", "key", "race", "go", "save", "load-trace", "timeline"]
    assert [name for name in reached if name in wanted][: len(wanted)] == wanted


def test_traces_are_saved_and_replayed(page: Chrome, tmp_path: Path) -> None:
    before, bars = lanes(page), len(page.find_elements(By.CSS_SELECTOR, ".bar"))
    folder = Path(page.downloads)  # type: ignore[attr-defined]
    at(page, "save").click()
    wait_until(lambda: (folder / "paceline-trace.json").exists())
    time.sleep(0.2)
    page.execute_script("document.body.dataset.state = ''")
    at(page, "load-trace").send_keys(str(folder / "paceline-trace.json"))
    wait_until(lambda: done(page))
    assert lanes(page) == before
    assert len(page.find_elements(By.CSS_SELECTOR, ".bar")) == bars
    for wrong in (b"nonsense", json.dumps({"format": "other"}).encode(), b'{"format": "paceline-trace-1"}'):
        (tmp_path / "wrong.json").write_bytes(wrong)
        at(page, "load-trace").send_keys(str(tmp_path / "wrong.json"))
        wait_until(lambda: bool(at(page, "error").text))
        page.execute_script("document.getElementById('error').textContent = ''")
    assert lanes(page) == before


def event(tokens: int, ms: float) -> dict[str, object]:
    told = {"tokens": [1] * tokens, "pieces": [{"text": "x" * tokens, "source": "suffix"}], "rounds": []}
    return {"ms": ms, "choice": {"paceline": told}}


def test_a_replay_ends_what_runs(page: Chrome, tmp_path: Path) -> None:
    """Nothing of that is shown among it; and its speed is of the tokens after the first that came."""
    fill(page, "tokens", "400")
    page.execute_script("document.body.dataset.state = ''")
    at(page, "go").send_keys(Keys.ENTER)
    wait_until(lambda: bool(lanes(page) and lanes(page)[0]))
    saved = {
        "format": "paceline-trace-1",
        "prompt": "x",
        "lanes": [{"name": "a", "events": [event(8, 0), event(2, 300)]}],
    }
    (tmp_path / "trace.json").write_text(json.dumps(saved))
    at(page, "load-trace").send_keys(str(tmp_path / "trace.json"))
    wait_until(lambda: lanes(page) == ["x" * 10])
    wait_until(lambda: done(page))
    time.sleep(0.3)
    assert lanes(page) == ["x" * 10]
    assert not page.find_elements(By.CSS_SELECTOR, ".bar")
    assert "6.7 tokens/s" in page.find_element(By.CSS_SELECTOR, ".lane .speed").text
    fill(page, "tokens", "30")
    answer(page)


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_width_scrolls_sideways(page: Chrome, width: int) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert page.execute_script("return document.scrollingElement.scrollWidth") <= width
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(page: Chrome, scheme: str) -> None:
    """Contrast of at least 4.5 (WCAG AA) of every colour that text has on what is behind it."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    style = "return n => getComputedStyle(document.documentElement).getPropertyValue(n).trim()"
    colours = page.execute_script(
        style.replace("return n =>", "const of = n =>")
        + "; return Object.fromEntries("
        + json.dumps(["--back", "--text", "--dim", "--box", "--accent", "--wrong", *(f"--c{n}" for n in range(5))])
        + ".map(n => [n, of(n)]))"
    )
    pairs = [("--text", f"--c{n}") for n in range(5)] + [("--text", "--box"), ("--dim", "--box"), ("--dim", "--back")]
    pairs += [("--back", "--accent"), ("--wrong", "--back")]
    weak = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: value for pair, value in weak.items() if value < 4.5} == {}


def test_an_error_is_shown(page: Chrome, server: Running) -> None:
    fill(page, "prompt", "a" * 600)
    at(page, "go").send_keys(Keys.ENTER)
    wait_until(lambda: "context" in at(page, "error").text)
    page.get_log("browser")  # type: ignore[no-untyped-call]  # a refusal is told there as well


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG 2 defines it."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
