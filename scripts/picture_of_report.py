"""Draw docs/report.png, the picture of a report in the README. Needs Chromium.

    python scripts/picture_of_report.py REPORT.html

Make the report with these commands:

    equipoise reproduce flame-table3 --only fashion-mnist
    equipoise reproduce flame-fig3 --only fashion-mnist --seeds 5
    equipoise report runs/flame --out REPORT.html --title FLAME
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

OUT = Path(__file__).parent.parent / "docs" / "report.png"
WIDTH, HEIGHT = 1280, 1370


def main(report: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(report.resolve().as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        hybrid = page.locator("#scene option").filter(has_text="hybrid").first  # the one with five seeds
        page.get_by_label("Problem").select_option(value=hybrid.get_attribute("value"))
        page.wait_for_timeout(1000)
        page.evaluate(
            "Plotly.Fx.hover(document.querySelector('[data-chart=scores]'), [{curveNumber: 1, pointNumber: 4}])"
        )
        page.wait_for_timeout(300)
        page.screenshot(path=OUT)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
