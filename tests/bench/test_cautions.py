from tailrace.bench.cautions import search_cautions, trial_cautions
from tailrace.bench.validity import FEW
from tests.bench.test_comparison_table import comparison, search, steady


def test_cautions_of_searches_that_differ_in_their_figures_alone_are_said_once():
    searches = [search("a", 0, 2.0), search("b", 0, 3.0), search("a", 1, 2.0), search("b", 1, None)]
    searches[0].cautions = ["decided alone at 8, 9.512/s: more (146)"]
    searches[1].cautions = ["decided alone at 7/s: more (146)", "too short"]
    searches[2].cautions = ["decided alone at 8.1/s: more (146)"]
    searches[3].cautions = ["not found, so not said"]
    assert search_cautions(comparison(searches=searches)) == [
        "3 of 3 searches (a 2, b 1), the first of them: decided alone at 8, 9.512/s: more (146).",
        "1 of 3 searches (b 1): too short.",
    ]


def test_cautions_of_valid_trials_say_whose_they_are(tmp_path):
    trials = [
        steady(tmp_path, "a", 0, 1.0, cautions=["43% went to others", f"29 requests: {FEW}"]),
        steady(tmp_path, "a", 1, 1.0, cautions=["12% went to others"]),
        steady(tmp_path, "b", 0, 1.0),
        steady(tmp_path, "b", 1, 1.0, ["invalid"], cautions=["99% went to others"]),
    ]
    assert trial_cautions(comparison(trials=trials)) == [
        "2 of 3 valid trials (a 2), the first of them: 43% went to others."
    ]
