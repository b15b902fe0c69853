import base64
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from pipeline import report as module
from pipeline.report import Gate, Metric, Report, RowCount, StageRow, render_report

VOID = {"meta", "img", "br", "link"}
EVIL = "<script>alert('x')</script>"
PNG = b"\x89PNG not really"
STAGES = (
    StageRow("ingest", 4, 120_000, 83.2, 41.7, 2877.7, 734_003_200, "ingest/0a1b"),
    StageRow("train", 1, 60_000, 7_260.0, 7_260.0, 8.26, 2_147_483_648, "train/9f8e"),
)
REPORT = Report(
    name="digits",
    run_id="20260102-0a1b2c",
    created="2026-01-02 03:04 UTC",
    picture=PNG,
    curves='<svg viewBox="0 0 1 1"><text>loss</text></svg>',
    stages=STAGES,
    metrics=(
        Metric("10-NN accuracy", 0.95321, "Share of rows whose neighbours agree", (0.9491, 0.9572)),
        Metric("trustworthiness", None, "Whether map neighbours are true neighbours"),
    ),
    gates=(Gate("recall", 0.9, 0.9655, True), Gate("displacement", 5.0, None, False)),
    rows=RowCount(read=120_240, mapped=120_000, quarantined=240, trained=60_000, held_out=12_034),
    quarantine=(("vector holds NaN", 140), ("vector is null", 100)),
    quarantine_examples=(("part-00001.parquet", 4_711, "id-17", "vector holds NaN"),),
    warnings=("recall was measured on 500 rows only",),
    files=(("map/part-0.parquet", "coordinates"), ("report.html", "this page")),
    job="lake:\n  url: s3://bucket/lake  # <ours>\n",
    versions=(("numpy", "2.4.6"), ("torch", "2.13.0")),
)


class Walker(HTMLParser):
    """Checks that tags are balanced, and collects addresses, texts and section names."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.sections: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [str(value) for name, value in attrs if re.search("src|href|url", name)]
        self.sections += [str(value) for name, value in attrs if (tag, name) == ("section", "id")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def test_the_page_is_whole_and_in_order() -> None:
    walker = Walker(render_report(REPORT))
    assert walker.open == []
    assert walker.sections == [
        *("metrics", "gates", "rows", "training", "stages"),
        *("quarantine", "files", "job", "versions"),
    ]


def test_the_page_asks_for_nothing_outside_itself() -> None:
    page = render_report(REPORT)
    walker = Walker(page)
    assert walker.addresses == ["data:image/png;base64," + base64.b64encode(PNG).decode()]
    assert not walker.tags & {"script", "link", "iframe"}
    assert not re.search(r"url\(|@import", page)


@pytest.mark.parametrize(
    "text",
    [
        *("120,240 read = 120,000 mapped + 240 quarantined", "60,000 rows", "12,034 rows"),
        *("0.9532", "0.9491 to 0.9572", "not measured", "0.9655", "20260102-0a1b2c"),
        *("41.7 s", "1 min 23 s", "2 h 01 min", "700.0 MiB", "2.0 GiB", "2,878"),
        *("vector holds NaN 140", "part-00001.parquet 4,711 id-17", "recall was measured"),
        *("✓ passed", "✗ refused", "1 refused", "map/part-0.parquet coordinates"),
        *("url: s3://bucket/lake # <ours>", "numpy 2.4.6", "torch 2.13.0", "ingest/0a1b"),
    ],
)
def test_the_page_says(text: str) -> None:
    assert text in Walker(render_report(REPORT)).text.replace("\xa0", " ")


def test_whatever_comes_from_the_lake_is_text() -> None:
    page = render_report(
        replace(
            REPORT,
            name=EVIL,
            run_id=EVIL,
            created=EVIL,
            stages=(replace(STAGES[0], name=EVIL, store=EVIL),),
            metrics=(Metric(EVIL, 1.0, EVIL),),
            gates=(Gate(EVIL, 1.0, 1.0, True),),
            quarantine=((EVIL, 1),),
            quarantine_examples=((EVIL, 1, EVIL, EVIL),),
            warnings=(EVIL,),
            files=((EVIL, EVIL),),
            job=EVIL,
            versions=((EVIL, EVIL),),
        )
    )
    walker = Walker(page)
    assert "script" not in walker.tags
    # Eighteen places; the run's name is the title as well, the metric's in the headline.
    assert walker.text.count(EVIL) == 20
    assert walker.open == []


def test_an_empty_run_still_makes_a_page() -> None:
    empty = replace(
        REPORT,
        curves="",
        stages=(),
        metrics=(),
        gates=(),
        quarantine=(),
        quarantine_examples=(),
        warnings=(),
        files=(),
        versions=(),
    )
    walker = Walker(render_report(empty))
    assert walker.open == []
    for text in ("No metric was measured", "sets no gates", "Nothing was trained", "Every row"):
        assert text in walker.text


def test_rows_that_do_not_add_up_are_said() -> None:
    assert "do not add up" not in render_report(REPORT)
    lost = replace(REPORT, rows=replace(REPORT.rows, mapped=119_999))
    assert "do not add up" in render_report(lost)


def test_at_most_twenty_examples_are_shown() -> None:
    examples = tuple((f"file-{i}", i, "id", "NaN") for i in range(30))
    page = render_report(replace(REPORT, quarantine_examples=examples))
    assert "file-19<" in page
    assert "file-20<" not in page


def test_equal_reports_give_equal_pages() -> None:
    assert render_report(REPORT) == render_report(REPORT)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "-"), (0.0123, "12 ms"), (5.04, "5.0 s"), (61, "1 min 01 s")),
        *((3_660, "1 h 01 min"), (90_000, "1 d 01 h")),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert module.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(0, "-"), (512, "512 B"), (1536, "1.5 KiB"), (2**60, "1024.0 PiB")]
)
def test_format_bytes(n_bytes: int, text: str) -> None:
    assert module.format_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "-"), (float("nan"), "-"), (0.123456, "0.1235"), (0.0, "0")),
        *((999.94, "999.9"), (123_456.7, "123,457")),
    ],
)
def test_format_number(value: float | None, text: str) -> None:
    assert module.format_number(value) == text
