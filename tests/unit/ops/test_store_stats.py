"""What `baton store stats` prints."""

from baton.ops.store import TierStats, print_stats


def test_no_figure_of_a_large_tier_is_cut_at_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_stats([TierStats("shared", 1_234_567, 1 << 40, 1 << 41, 1.0, 864_000.0, 1 << 30)])
    printed = capsys.readouterr().out
    figures = "1,234,567", "1,048,576.0", "2,097,152", "1,024.0", "864,000"
    assert [each for each in figures if each not in printed] == []
