import pytest

from blockdraft.reports import write_report

import synthetic


@pytest.fixture(scope="session")
def evaluations(tmp_path_factory):
    """Two targets; the second with one kind of drafter, without dynamics."""
    folder = tmp_path_factory.mktemp("evaluations")
    first = synthetic.results()
    second = synthetic.results(
        "org/Qwen_3", drafters=(("dflash", "CE"), ("dflash", "KL"), ("dflash", "BV")), shift=0.5, with_dynamics=False
    )
    return [
        synthetic.write(folder / "a", first, synthetic.traces(first)),
        synthetic.write(folder / "b", second, synthetic.traces(second, num_prompts=1, seed=1)),
    ]


@pytest.fixture(scope="session")
def report(evaluations, tmp_path_factory):
    """Everything written from them."""
    return write_report(evaluations, tmp_path_factory.mktemp("report"))
