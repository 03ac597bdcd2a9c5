import pytest

from magi2 import errors
from magi2.contract import Problem
from magi2.parallel.layout import Layout
from worker.engine_api import EngineError, InvalidInput, LoadRefusedError, LoadSpec, OutOfMemory, Stopped
from worker.engines import magi2
from worker.engines.magi2 import Magi2Engine


def spec(**members):
    return LoadSpec(
        **{
            "profile": "sp4",
            "rank": 0,
            "world": 1,
            "devices": (),
            "ckpt_root": "/weights",
            "deterministic": False,
            **members,
        }
    )


def ignore(*_):
    """Take a report."""


def test_hugging_face_kernels_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(magi2, "version", lambda _name: "0.16.2")
    with pytest.raises(LoadRefusedError, match=r"`kernels` 0\.16\.2 .*pip uninstall kernels"):
        Magi2Engine().load(spec(), ignore)


def test_our_own_package_of_that_name_is_no_reason_to_refuse():
    magi2.refuse_hf_kernels()


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"layout": {"cpu_offload": True}}, "--cpu-offload without --layerwise"),
        ({"layout": {"data_parallel": 2}}, "--data-parallel above 1 needs --dlo"),
        ({"layout": {"ulises": 2}}, "--ulises is not a flag of a layout"),
    ],
)
def test_layout_that_cannot_run_is_refused_with_its_flags(members, named):
    with pytest.raises(LoadRefusedError) as refusal:
        Magi2Engine().load(spec(**members), ignore)
    assert named in str(refusal.value)
    assert "profile sp4" in str(refusal.value)


def test_layout_that_needs_other_ranks_is_refused(tmp_path):
    with pytest.raises(LoadRefusedError, match=r"1 ranks were launched, but .* needs 4"):
        Magi2Engine().load(spec(ckpt_root=str(tmp_path), layout={"ulysses": 4}), ignore)


def test_layout_of_one_rank_is_the_plain_one():
    flags = {"tp": 1, "ulysses": 1, "dlo": False, "ep": None, "resident_blocks": 0}
    assert magi2.layout_of(spec(layout=flags)) == Layout()


def test_layout_outside_the_qualified_worlds_is_warned_of_once(caplog):
    for rank in range(2):
        magi2.layout_of(spec(world=2, rank=rank, layout={"ulysses": 2}))
    assert [record.getMessage() for record in caplog.records] == ["layout_unqualified profile=sp4 ranks=2"]


def test_missing_checkpoint_is_refused_with_the_variable_to_set():
    with pytest.raises(LoadRefusedError, match="MAGI2_CKPT_ROOT"):
        Magi2Engine().load(spec(ckpt_root=None), ignore)


def test_rank_uses_the_one_device_that_it_sees():
    assert magi2._engine_config(spec(devices=(5,))).device == "cuda:0"
    assert magi2._engine_config(spec()).device == "cpu"


def test_profile_says_dtype_quality_and_when_steps_may_be_cached() -> None:
    layout = {"ulysses": 4, "dtype": "float32", "crf": 4, "cache_threshold": 0.1}
    assert magi2.layout_of(spec(world=4, layout=layout)) == Layout(ulysses=4)
    config = magi2._engine_config(spec(layout=layout))
    assert (config.dtype, config.crf, config.cache.threshold) == ("float32", 4, 0.1)
    usual = magi2._engine_config(spec())
    assert (usual.dtype, usual.crf, usual.cache.warmup_steps) == ("bfloat16", 10, 4)
    with pytest.raises(LoadRefusedError, match="profile sp4: the cache's threshold must lie between 0 and 1"):
        magi2._engine_config(spec(layout={"cache_threshold": 2.0}))


@pytest.mark.parametrize(("text", "version"), [("2", 2), ("", None)])
def test_environment_insists_on_an_attention(
    monkeypatch: pytest.MonkeyPatch, text: str, version: int | None
) -> None:
    monkeypatch.setenv("MAGI2_FLASH_ATTN_VERSION", text)
    assert magi2._engine_config(spec()).flash_attn_version == version


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (errors.OutOfMemory(1 << 30, 2 << 30), OutOfMemory),
        (errors.Stopped("stopped after step 3"), Stopped),
        (errors.EngineError("the latents are not finite"), EngineError),
        (errors.InvalidInput([Problem("prompt", "prompt_too_long", "too long")]), InvalidInput),
        (errors.InvalidInput("the video size is odd"), InvalidInput),
    ],
)
def test_typed_errors_of_the_engine_keep_their_kind_and_their_words(raised, told):
    fault = magi2._fault_of(raised)
    assert type(fault) is told
    assert str(fault) == str(raised)


def test_error_without_a_counterpart_stays_itself_and_becomes_a_crash():
    with pytest.raises(errors.CheckpointError):
        magi2._fault_of(errors.CheckpointError("gone"))
    with pytest.raises(errors.PeerLost):
        magi2._fault_of(errors.PeerLost("rank 1 is gone"))


def test_engine_that_is_not_loaded_says_so():
    with pytest.raises(EngineError, match="not loaded"):
        Magi2Engine().fingerprint()
    Magi2Engine().close()
