"""The choice of a backend, as a table: PyTorch, what is installed and the environment in, decision out."""

import pytest

from multigemm import errors
from multigemm._selection import Candidate, Front, Torch, select
from multigemm._versions import parse_version, same_release, show

FRONT = Front("0.1.0", 1, 1)
KINDS = {"cpu": ("cpu", None), "cu12": ("cuda", 12), "cu13": ("cuda", 13), "rocm": ("rocm", 7)}
CPU = ("2.13.0+cpu", None, None)
CU12, CU13 = ("2.13.0", "12.8", None), ("2.13.0", "13.0", None)
HIP7, HIP10 = ("2.13.0", None, "7.14.60850-abc"), ("2.13.0", None, "10.0.1")


def installed(text):
    """Read ``"cu13"``, ``"cu13@/other"`` (its folder), ``"cu13 version=0.2.0 abi=2"``, ``"cu13 broken"``."""
    head, *options = text.split()
    name, _, folder = head.partition("@")
    folder = folder or f"/site/multigemm_{name}"
    kind, major = KINDS.get(name, ("cpu" if "cpu" in name else "cuda", 13 if "cu13" in name else None))
    info = {"protocol": 1, "abi": 1, "kind": kind, "major": major, "min_torch": [2, 10], "min_blas": None}
    version, error = "0.1.0", None
    for option in options:
        key, _, value = option.partition("=")
        if key == "version":
            version = value
        elif key == "min_torch":
            info[key] = [int(part) for part in value.split(".")]
        elif key == "broken":
            info, error = None, "backend.json cannot be read"
        elif key == "stale":
            info, folder, error = None, None, "the package is not there"
        elif key == "kind":
            info[key] = value
        else:
            info[key] = int(value) if value != "none" else None
    return Candidate(name, f"multigemm-{name}", version, folder, info, error, f"/site/{name}.dist-info")


# device, torch, installed, environment (backend, fallback), outcome, what happens on failure, text
TABLE = [
    # CPU tensors look at the CPU backend only, whatever PyTorch is
    ("cpu", CPU, [], {}, None, "silent", ""),
    ("cpu", CPU, ["cpu"], {}, "cpu", "warn", ""),
    ("cpu", CU13, ["cpu", "cu13"], {}, "cpu", "warn", ""),
    ("cpu", HIP7, ["cpu", "rocm"], {}, "cpu", "warn", ""),
    ("cpu", CU13, ["cu13"], {}, None, "silent", ""),
    ("cpu", CU13, ["cu13 protocol=2"], {}, None, "silent", ""),
    ("cpu", CPU, ["cu12", "cu13", "rocm"], {}, None, "silent", ""),
    ("cpu", CPU, ["cpu version=0.2.0"], {}, "VersionSkew", "warn", "0.2.0"),
    ("cpu", CPU, ["cpu protocol=2"], {}, "AbiSkew", "warn", "protocol 2"),
    ("cpu", CPU, ["cpu abi=2"], {}, "AbiSkew", "warn", "ABI 2"),
    ("cpu", CPU, ["cpu broken"], {}, "BrokenMetadata", "warn", "cannot be read"),
    ("cpu", CPU, ["cpu stale"], {}, "BrokenMetadata", "warn", "not there"),
    ("cpu", CPU, ["cpu@/a", "cpu@/b"], {}, "Ambiguous", "warn", "/a (version 0.1.0) and /b"),
    ("cpu", CPU, ["cpu min_torch=2.14"], {}, "VersionSkew", "warn", "PyTorch 2.14 or newer"),
    ("cpu", CPU, ["cpu stale", "cpu"], {}, "cpu", "warn", ""),
    # devices for which no backend exists
    ("mps", CPU, ["cpu", "cu13"], {}, None, "silent", ""),
    ("xpu", CPU, [], {}, None, "silent", ""),
    ("npu", CU13, ["cu13"], {}, None, "silent", ""),
    ("privateuseone", CU13, ["cu13 broken"], {"backend": "cu13"}, None, "silent", ""),
    # the matching CUDA major wins, and nothing else does
    ("cuda", CU12, ["cu12"], {}, "cu12", "raise", ""),
    ("cuda", CU13, ["cu13"], {}, "cu13", "raise", ""),
    ("cuda", CU12, ["cu12", "cu13"], {}, "cu12", "raise", ""),
    ("cuda", CU13, ["cu12", "cu13"], {}, "cu13", "raise", ""),
    ("cuda", CU13, ["cu13", "cu12"], {}, "cu13", "raise", ""),
    ("cuda", CU13, ["cpu", "cu12", "cu13", "rocm"], {}, "cu13", "raise", ""),
    ("cuda", CU13, ["cu12 broken", "cu13"], {}, "cu13", "raise", ""),
    ("cuda", CU13, ["cu12 version=0.2.0", "cu13"], {}, "cu13", "raise", ""),
    ("cuda", CU13, ["cu12@/a", "cu12@/b", "cu13"], {}, "cu13", "raise", ""),
    ("cuda", CU13, [], {}, "NotInstalled", "raise", 'pip install "multigemm[cu13]==0.1.0"'),
    ("cuda", CU12, [], {}, "NotInstalled", "raise", 'pip install "multigemm[cu12]==0.1.0"'),
    ("cuda", CU13, ["cpu"], {}, "NotInstalled", "raise", 'pip install "multigemm[cu13]==0.1.0"'),
    ("cuda", CU13, ["cu12"], {}, "FlavourMismatch", "raise", "built for CUDA 12, while"),
    ("cuda", CU12, ["cu13"], {}, "FlavourMismatch", "raise", 'pip install "multigemm[cu12]==0.1.0"'),
    ("cuda", CU13, ["cu12 version=0.2.0"], {}, "FlavourMismatch", "raise", "CUDA 13.0"),
    ("cuda", CU13, ["cu12 protocol=2"], {}, "FlavourMismatch", "raise", "CUDA 13.0"),
    ("cuda", ("2.10.0", "11.8", None), ["cu12"], {}, "FlavourMismatch", "raise", "CUDA 11.8"),
    ("cuda", ("2.10.0", "11.8", None), [], {}, "NotInstalled", "raise", "built for CUDA 12 or 13"),
    ("cuda", CPU, ["cu13"], {}, "FlavourMismatch", "raise", "no GPU support"),
    ("cuda", CPU, ["rocm"], {}, "FlavourMismatch", "raise", "no GPU support"),
    ("cuda", CPU, [], {}, "FlavourMismatch", "raise", "install a PyTorch built for"),
    # ROCm
    ("cuda", HIP7, ["rocm"], {}, "rocm", "raise", ""),
    ("cuda", HIP7, ["cu12", "cu13", "rocm"], {}, "rocm", "raise", ""),
    ("cuda", HIP7, ["cu13"], {}, "FlavourMismatch", "raise", 'pip install "multigemm[rocm]==0.1.0"'),
    ("cuda", HIP7, ["cu12", "cu13"], {}, "FlavourMismatch", "raise", "only cu12, cu13 is installed"),
    ("cuda", HIP7, [], {}, "NotInstalled", "raise", "multigemm[rocm]"),
    ("cuda", HIP10, ["rocm"], {}, "FlavourMismatch", "raise", "built for ROCm 10.0.1"),
    ("cuda", HIP10, ["rocm major=10"], {}, "rocm", "raise", ""),
    ("cuda", ("2.13.0", "13.0", "7.2.0"), ["cu13", "rocm"], {}, "rocm", "raise", ""),
    ("cuda", CU13, ["rocm"], {}, "FlavourMismatch", "raise", "needs a CUDA backend"),
    # skew and damage
    ("cuda", CU13, ["cu13 version=0.2.0"], {}, "VersionSkew", "raise", 'pip install "multigemm-cu13==0.1.0"'),
    ("cuda", CU13, ["cu13 version=0.0.9"], {}, "VersionSkew", "raise", "0.0.9"),
    ("cuda", CU13, ["cu13 version=0.1.0rc1"], {}, "VersionSkew", "raise", "0.1.0rc1"),
    ("cuda", CU13, ["cu13 version=0.1.0+local"], {}, "cu13", "raise", ""),
    ("cuda", CU13, ["cu13 version=0.10.0"], {}, "VersionSkew", "raise", "0.10.0"),
    ("cuda", CU13, ["cu13 protocol=2"], {}, "AbiSkew", "raise", "protocol 2"),
    ("cuda", CU13, ["cu13 abi=0"], {}, "AbiSkew", "raise", "ABI 0"),
    ("cuda", CU13, ["cu13 major=none"], {}, "cu13", "raise", ""),
    ("cuda", CU13, ["gpu kind=cuda"], {}, "BrokenMetadata", "raise", "names no CUDA major"),
    ("cuda", CU13, ["cu13 broken"], {}, "BrokenMetadata", "raise", "--force-reinstall"),
    ("cuda", CU13, ["cu12", "cu13 broken"], {}, "BrokenMetadata", "raise", "cannot be read"),
    ("cuda", CU13, ["cu13 stale"], {}, "BrokenMetadata", "raise", "not there"),
    ("cuda", CU13, ["cu13 stale", "cu13"], {}, "cu13", "raise", ""),
    ("cuda", CU13, ["cu13@/a", "cu13@/b"], {}, "Ambiguous", "raise", "pip uninstall multigemm-cu13"),
    ("cuda", CU13, ["cu13@/a", "cu13@/b version=0.2.0"], {}, "Ambiguous", "raise", "/b (version 0.2.0)"),
    ("cuda", CU13, ["cu13@/a", "cu13@/b broken"], {}, "Ambiguous", "raise", "2 folders"),
    ("cuda", CU13, ["cu13", "mycu13"], {}, "Ambiguous", "raise", "MULTIGEMM_BACKEND=cu13"),
    ("cuda", CU13, ["cu13", "mycu13"], {"backend": "mycu13"}, "mycu13", "raise", ""),
    ("cuda", CU13, ["cu13@/a", "cu13@/b", "mycu13"], {}, "Ambiguous", "raise", "/a"),
    # versions of PyTorch are tuples
    ("cuda", ("2.9.1", "13.0", None), ["cu13"], {}, "VersionSkew", "raise", "torch>=2.10"),
    ("cuda", ("2.10.0", "13.0", None), ["cu13"], {}, "cu13", "raise", ""),
    ("cuda", ("2.13.0a0+git", "13.0", None), ["cu13"], {}, "cu13", "raise", ""),
    ("cuda", ("3.0.0", "13.0", None), ["cu13"], {}, "cu13", "raise", ""),
    # MULTIGEMM_BACKEND pins, and lifts no check
    ("cuda", CU13, ["cu12", "cu13"], {"backend": "cu13"}, "cu13", "raise", ""),
    ("cuda", CU13, ["cu12", "cu13"], {"backend": "CU13 "}, "cu13", "raise", ""),
    ("cuda", CU13, ["cu12", "cu13"], {"backend": ""}, "cu13", "raise", ""),
    ("cuda", CU13, ["cu12", "cu13"], {"backend": "cu12"}, "FlavourMismatch", "raise", "CUDA 12, while"),
    ("cuda", CU13, ["cu13"], {"backend": "cu12"}, "NotInstalled", "raise", "MULTIGEMM_BACKEND=cu12"),
    ("cuda", CU13, ["cu13"], {"backend": "rocm"}, "NotInstalled", "raise", "MULTIGEMM_BACKEND=rocm"),
    ("cuda", CU13, ["cu13", "rocm"], {"backend": "rocm"}, "FlavourMismatch", "raise", "serves ROCm"),
    ("cuda", CU13, ["cu13 version=0.2.0"], {"backend": "cu13"}, "VersionSkew", "raise", "0.2.0"),
    ("cuda", CU13, ["cu13 abi=2"], {"backend": "cu13"}, "AbiSkew", "raise", "ABI 2"),
    ("cuda", CU13, ["cu13", "cpu"], {"backend": "cpu"}, "NotInstalled", "raise", "unset MULTIGEMM_BACKEND"),
    ("cuda", CU13, ["cu13"], {"backend": "none"}, "NotInstalled", "raise", "unset MULTIGEMM_BACKEND"),
    ("cuda", CU13, ["cu13"], {"backend": "cu14"}, "NotInstalled", "raise", "known names: cpu, cu12"),
    # MULTIGEMM_ANY_CUDA lets the named backend be of another CUDA major, and lifts nothing else
    ("cuda", CU13, ["cu12", "cu13"], {"backend": "cu12", "any_cuda": "1"}, "cu12", "raise", ""),
    ("cuda", CU12, ["cu12", "cu13"], {"backend": "cu13", "any_cuda": "1"}, "cu13", "raise", ""),
    ("cuda", CU13, ["cu12", "cu13"], {"backend": "cu13", "any_cuda": "1"}, "cu13", "raise", ""),
    ("cuda", CU13, ["cu12", "cu13"], {"any_cuda": "1"}, "cu13", "raise", ""),
    ("cuda", CU13, ["cu12"], {"any_cuda": "1"}, "FlavourMismatch", "raise", "CUDA 12, while"),
    ("cuda", CU13, ["cu12"], {"backend": "cu12", "any_cuda": "0"}, "FlavourMismatch", "raise", "while"),
    ("cuda", CU13, ["cu12"], {"backend": "cu12", "any_cuda": "yes"}, "FlavourMismatch", "raise", "while"),
    ("cuda", CU13, ["cu12 abi=2"], {"backend": "cu12", "any_cuda": "1"}, "AbiSkew", "raise", "ABI 2"),
    ("cuda", CU13, ["cu12 broken"], {"backend": "cu12", "any_cuda": "1"}, "BrokenMetadata", "raise", ""),
    ("cuda", CU13, ["cu12 version=0.2.0"], {"backend": "cu12", "any_cuda": "1"}, "VersionSkew", "raise", ""),
    ("cuda", HIP10, ["rocm"], {"backend": "rocm", "any_cuda": "1"}, "FlavourMismatch", "raise", "ROCm 10"),
    ("cuda", HIP7, ["cu12"], {"backend": "cu12", "any_cuda": "1"}, "FlavourMismatch", "raise", "ROCm"),
    ("cuda", CPU, ["cu12"], {"backend": "cu12", "any_cuda": "1"}, "FlavourMismatch", "raise", "no GPU"),
    ("cpu", CPU, ["cpu"], {"backend": "cpu"}, "cpu", "warn", ""),
    ("cpu", CPU, ["cpu"], {"backend": "none"}, None, "silent", ""),
    ("cpu", CPU, ["cpu broken"], {"backend": "none"}, None, "silent", ""),
    ("cpu", CPU, [], {"backend": "cpu"}, "NotInstalled", "warn", "multigemm[cpu]"),
    ("cpu", CPU, ["cpu version=0.2.0"], {"backend": "cpu"}, "VersionSkew", "warn", "0.2.0"),
    ("cpu", CU13, ["cpu", "cu13"], {"backend": "cu13"}, "cpu", "warn", ""),
    ("cpu", CPU, ["cpu", "mycpu"], {"backend": "mycpu"}, "mycpu", "warn", ""),
    ("cpu", CPU, ["cpu", "mycpu"], {}, "Ambiguous", "warn", "cpu, mycpu all fit"),
    # MULTIGEMM_FALLBACK
    ("cuda", CU13, [], {"fallback": "torch"}, "NotInstalled", "warn", ""),
    ("cuda", CU13, ["cu12"], {"fallback": "torch"}, "FlavourMismatch", "warn", ""),
    ("cuda", CU13, ["cu13"], {"fallback": "torch"}, "cu13", "warn", ""),
    ("cuda", CU13, ["cu13"], {"fallback": "torch", "backend": "none"}, "NotInstalled", "warn", ""),
    ("cuda", CU13, [], {"fallback": "yes"}, "NotInstalled", "raise", ""),
]


@pytest.mark.parametrize(("device", "torch", "backends", "env", "outcome", "on_failure", "text"), TABLE)
def test_the_table(device, torch, backends, env, outcome, on_failure, text):
    candidates = [installed(item) for item in backends]
    decision = select(device, Torch.of(*torch), candidates, FRONT, **env)
    assert decision.on_failure == on_failure
    if outcome is None:
        assert decision.chosen is None
        assert decision.failure is None
    elif hasattr(errors, outcome):
        assert decision.chosen is None
        assert decision.failure.error is getattr(errors, outcome)
        assert text in f"{decision.failure.cause}\n{decision.failure.cure}"
        assert decision.failure.cause
        assert decision.failure.cure
    else:
        assert decision.failure is None
        assert decision.chosen.name == outcome
        assert decision.chosen.error is None
    if device in ("cpu", "cuda"):
        assert [v.candidate for v in decision.verdicts] == candidates
        assert all(v.reason for v in decision.verdicts)
        assert all(v.accepted == (v.failure is None) for v in decision.verdicts)


def test_the_table_is_large_and_holds_no_case_twice():
    assert len(TABLE) >= 60
    assert len({repr(row[:4]) for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("7.14.60850", (7, 14, 60850)),
        ("7.2.53211-e1a6bc5663", (7, 2, 53211)),
        ("10.0.1", (10, 0, 1)),
        ("2.13.0a0+git", (2, 13, 0)),
        ("2.13.0+cu130", (2, 13, 0)),
        ("12.8", (12, 8)),
        ("2.10", (2, 10)),
        ("v1.2", (1, 2)),
        ("13", (13,)),
    ],
)
def test_versions_are_tuples(text, numbers):
    assert parse_version(text) == numbers


def test_versions_compare_as_versions():
    assert parse_version("2.10.0") > parse_version("2.9.1")
    assert parse_version("7.14.60850") > parse_version("7.2.0")
    assert parse_version("10.0.1") > parse_version("7.14.60850")
    assert show((2, 10)) == "2.10"


@pytest.mark.parametrize("text", ["", "unknown", "git-1.2", "+cu130"])
def test_a_text_that_is_no_version_is_refused(text):
    with pytest.raises(ValueError, match="not a version"):
        parse_version(text)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("0.1.0", "0.1.0", True),
        ("0.1.0", "0.1", True),
        ("0.1.0+cu13", "0.1.0", True),
        ("0.1.0rc1", "0.1.0", False),
        ("0.1.0rc1", "0.1.0-rc.1", True),
        ("0.1.0", "0.10.0", False),
        ("0.1.0.dev1", "0.1.0", False),
        ("1.0", "10", False),
        ("unknown", "0.1.0", False),
    ],
)
def test_what_counts_as_one_release(left, right, same):
    assert same_release(left, right) is same
    assert same_release(right, left) is same


def test_rocm_versions_stay_whole():
    torch = Torch.of("2.13.0", None, "7.14.60850-abc")
    assert torch.flavour.kind == "rocm"
    assert torch.flavour.version == (7, 14, 60850)
    assert str(torch) == "PyTorch 2.13.0 (ROCm 7.14.60850)"


def test_remarks_on_the_environment_reach_the_decision():
    odd = select("cuda", Torch.of(*CU13), [], FRONT, fallback="yes")
    assert any("MULTIGEMM_FALLBACK=yes" in note for note in odd.notes)
    odd = select("cpu", Torch.of(*CPU), [installed("cpu")], FRONT, backend="cu14")
    assert odd.chosen.name == "cpu"
    assert any("MULTIGEMM_BACKEND=cu14" in note for note in odd.notes)
    odd = select("cuda", Torch.of(*CU13), [installed("cu13")], FRONT, any_cuda="yes")
    assert any("MULTIGEMM_ANY_CUDA=yes" in note for note in odd.notes)
    odd = select("cuda", Torch.of(*CU13), [installed("cu13")], FRONT, any_cuda="1")
    assert any("MULTIGEMM_BACKEND has to name" in note for note in odd.notes)
    plain = select("cuda", Torch.of(*CU13), [installed("cu12")], FRONT, any_cuda="1", backend="cu12")
    assert plain.notes == ()
    assert "built for CUDA 12, while" in plain.verdicts[0].reason
    plain = select("cpu", Torch.of(*CPU), [installed("cpu")], FRONT, backend="cu13", any_cuda="1")
    assert plain.notes == ()
    plain = select("cpu", Torch.of(*CPU), [installed("cpu")], FRONT, backend="cu13")
    assert plain.notes == ()


@pytest.mark.parametrize("kind", ["ShapeError", "DeviceError", "GroupSizesError", "OptionError"])
def test_bad_calls_are_value_errors(kind):
    assert issubclass(getattr(errors, kind), ValueError)
    assert issubclass(getattr(errors, kind), errors.MultigemmError)
    assert issubclass(errors.DTypeError, TypeError)


def test_backend_errors_are_import_errors_and_keep_their_steps():
    error = errors.AbiSkew("text", device_type="cuda", backend="cu13", steps=["one"])
    assert isinstance(error, ImportError)
    assert isinstance(error, errors.BackendError)
    assert (error.device_type, error.backend, error.steps) == ("cuda", "cu13", ("one",))


def test_native_errors_say_everything():
    error = errors.NativeError("blas failed", status="X", device="cuda:1", stream=16, shapes={"x": (3, 4)})
    assert isinstance(error, RuntimeError)
    assert str(error) == "blas failed (status X, device cuda:1, stream 0x10, x[3, 4])"
