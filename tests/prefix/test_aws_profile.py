"""Profiles with the keys of an object store: what is read, what is refused, and that no key is ever told."""

import logging
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_prefix.tiers import aws_profile, remote
from kv_prefix.tiers.aws_profile import AwsKeys, ProfileKeys, find_profile
from kv_prefix.tiers.blocks import PlacedBlock
from kv_prefix.tiers.catalog import TierCatalog
from kv_prefix.tiers.errors import AwsProfileError, TierIOError
from kv_prefix.tiers.remote import RemoteStore, require_usable
from tests.prefix.conftest import KEY, SECRET
from tests.prefix.helpers_tiers import SHAPE, chain, content, cut, prompt, with_bytes
from tests.prefix.test_tier_remote import ROOM, Open, by_place, fill

Environ = dict[str, str]
KEYS = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
ANOTHER = "aws_access_key_id = other\naws_secret_access_key = hidden-secret\naws_session_token = hidden-token\n"


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., Environ]:
    """Writes the two files; gives an environment that names them."""

    def written(credentials: str | None = None, config: str | None = None, **more: str) -> Environ:
        for name, text in (("credentials", credentials), ("config", config)):
            if text is not None:
                (tmp_path / name).write_text(text)
        named = {"AWS_SHARED_CREDENTIALS_FILE": "credentials", "AWS_CONFIG_FILE": "config"}
        return {name: str(tmp_path / file) for name, file in named.items()} | more

    return written


def keys_of(environ: Environ) -> AwsKeys | None:
    profile = find_profile(environ)
    return profile.keys if profile else None


def test_a_named_profile_is_read_from_either_file(files: Callable[..., Environ]) -> None:
    environ = files(f"[default]\n{ANOTHER}[mine]\n{KEYS}", "[profile mine]\nregion = eu-west-1\n", AWS_PROFILE="mine")
    profile = find_profile(environ)
    assert profile is not None and profile.name == "mine" and profile.region == "eu-west-1"
    assert profile.keys == AwsKeys(KEY, SECRET, "")
    environ = files(
        "[default]\n", f'[profile "mine"]\n{ANOTHER}endpoint_url = http://h:9\n', AWS_DEFAULT_PROFILE="mine"
    )
    profile = find_profile(environ)
    assert profile is not None and profile.endpoint_url == "http://h:9"
    assert profile.keys == AwsKeys("other", "hidden-secret", "hidden-token")


def test_keys_of_the_credentials_file_come_first_and_whole(files: Callable[..., Environ]) -> None:
    """A token belongs to the pair that it stands with."""
    environ = files(f"[mine]\n{KEYS}", f"[profile mine]\n{ANOTHER}region = r\n", AWS_PROFILE="mine")
    assert keys_of(environ) == AwsKeys(KEY, SECRET, "")


def test_without_a_name_it_is_default_which_need_not_be(files: Callable[..., Environ]) -> None:
    assert find_profile(files()) is None
    assert keys_of(files(f"[default]\n{KEYS}")) == AwsKeys(KEY, SECRET, "")
    assert keys_of(files("[mine]\n", f"[default]\n{KEYS}")) == AwsKeys(KEY, SECRET, "")
    # Keys may come from the machine then; the rest is said here.
    profile = find_profile(files("", "[default]\nregion = eu-west-1\nsso_session = s\n"))
    assert profile is not None and profile.keys is None and profile.region == "eu-west-1"


def test_keys_in_the_environment_come_first_and_so_does_a_web_identity_before_the_default(
    files: Callable[..., Environ],
) -> None:
    text = f"[default]\n{KEYS}[mine]\n{KEYS}region = r\n"
    for more in ({}, {"AWS_PROFILE": "mine"}):
        assert keys_of(files(text, AWS_ACCESS_KEY_ID="x", **more)) is None
    assert keys_of(files(text, AWS_WEB_IDENTITY_TOKEN_FILE="x")) is None
    assert keys_of(files(text, AWS_WEB_IDENTITY_TOKEN_FILE="x", AWS_PROFILE="mine")) is not None


def test_who_names_no_profile_is_stopped_by_none(
    files: Callable[..., Environ], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = files("[default]\naws_access_key_id = half\n", "[default]\nregion = r\n")
    profile = find_profile(half | {"AWS_ACCESS_KEY_ID": "x"})
    assert profile is not None and profile.keys is None and profile.region == "r"
    assert keys_of(half | {"AWS_WEB_IDENTITY_TOKEN_FILE": "x"}) is None
    with pytest.raises(AwsProfileError):
        find_profile(half)  # nobody else has keys: then it is a mistake
    (tmp_path / "credentials").unlink()
    (tmp_path / "credentials").mkdir()  # cannot be read, whoever asks
    assert keys_of(half) is None
    with pytest.raises(AwsProfileError, match="Is a directory"):
        find_profile(half | {"AWS_PROFILE": "default"})

    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert find_profile({}) is None
    with pytest.raises(AwsProfileError, match=r"neither in ~/\.aws/credentials"):
        find_profile({"AWS_PROFILE": "mine"})


def test_the_files_lie_below_the_home_folder_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(f"[default]\n{KEYS}")
    assert keys_of({}) == AwsKeys(KEY, SECRET, "")
    (tmp_path / "elsewhere").write_text(f"[default]\n{ANOTHER}")
    other = keys_of({"AWS_SHARED_CREDENTIALS_FILE": "~/elsewhere"})
    assert other is not None and other.access_key_id == "other"


WRONG = [
    ("absent", f"[other]\n{KEYS}", None, "it is neither in {credentials} nor in {config}"),
    ("no files", None, None, "it is neither in {credentials} nor in {config}"),
    ("config section without its word", None, f"[mine]\n{KEYS}", "it is neither in {credentials} nor in {config}"),
    (
        "half a pair",
        "[mine]\naws_access_key_id = a\n",
        None,
        "{credentials} has its aws_access_key_id and no aws_secret_",
    ),
    (
        "other half",
        None,
        f"[profile mine]\naws_secret_access_key = {SECRET}\n",
        "{config} has its aws_secret_access_k",
    ),
    ("nothing", "[mine]\n", None, "it has no aws_access_key_id, neither in {credentials} nor in {config}"),
    ("sign-on", None, "[profile mine]\nsso_session = s\n", "no keys but sso_session ({config}), which is not followed"),
    ("role", None, "[profile mine]\nrole_arn = r\nsource_profile = d\n", "no keys but role_arn and source_profile"),
    ("no section", KEYS, None, "{credentials}: line 1 is not understood"),
    ("broken line", f"[mine]\n{KEYS}{SECRET}\n", None, "{credentials}: line 4 is not understood"),
]


@pytest.mark.parametrize(("credentials", "config", "told"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_what_is_wrong_is_told_with_profile_and_file_and_without_a_secret(
    files: Callable[..., Environ], credentials: str | None, config: str | None, told: str
) -> None:
    environ = files(credentials, config, AWS_PROFILE="mine")
    with pytest.raises(AwsProfileError) as caught:
        find_profile(environ)
    names = {"credentials": environ["AWS_SHARED_CREDENTIALS_FILE"], "config": environ["AWS_CONFIG_FILE"]}
    said = str(caught.value)
    assert said.startswith("AWS profile 'mine': ") and told.format(**names) in said
    assert SECRET not in said and KEY not in said and SECRET not in repr(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_file_that_is_no_text_too_large_or_a_folder_is_told(files: Callable[..., Environ], tmp_path: Path) -> None:
    environ = files(AWS_PROFILE="mine")
    file = tmp_path / "credentials"
    for raw, told in (
        (b"[mine]\nx = \xff\n", "expected UTF-8 text"),
        (b"#" * (aws_profile.FILE_BYTES_MAX + 1), "more than 1048576 bytes"),
        (None, "Is a directory"),
    ):
        if raw is None:
            file.unlink()
            file.mkdir()
        else:
            file.write_bytes(raw)
        with pytest.raises(AwsProfileError, match=told) as caught:
            find_profile(environ)
        assert str(file) in str(caught.value)


def test_keys_show_in_no_text_about_them(files: Callable[..., Environ]) -> None:
    profile = find_profile(files(f"[default]\n{ANOTHER}"))
    assert "hidden" not in repr(profile) + str(profile) and "other" in repr(profile)
    assert "hidden" not in repr(ProfileKeys(files()))


@given(st.text("[]=:#;%$ \n\tabmine\"'\\\x00\u2028\xe4", max_size=60) | st.text(max_size=100))
def test_whatever_a_file_holds_it_is_read_or_refused(text: str) -> None:
    """Never another kind of error, and never a line of it in the sentence."""
    try:
        parsed = aws_profile._parse(text.encode("utf-8", "surrogatepass"), Path("FILE"), "mine")
    except AwsProfileError as error:
        assert re.fullmatch(
            r"AWS profile 'mine': FILE: (line \d+ is not understood|expected UTF-8 text|ValueError)", str(error)
        )
    else:
        assert all(isinstance(value, str) for section in parsed.values() for value in section.values())


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Environ], None]:
    """Makes an environment this process's own."""

    def used(environ: Environ) -> None:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return used


def opener(server: str, prefix: str) -> Open:
    def opened(num_blocks: int = 64) -> tuple[RemoteStore, list[PlacedBlock]]:
        return RemoteStore.open(f"s3://bucket/{prefix}", "node-1", SHAPE, num_blocks * ROOM, server)

    return opened


@pytest.mark.parametrize("said_in", ["credentials", "config"])
def test_a_profile_signs_requests_to_a_real_s3_server(
    s3_server: tuple[str, Path],
    tmp_path: Path,
    files: Callable[..., Environ],
    use: Callable[[Environ], None],
    said_in: str,
) -> None:
    """Endpoint and region from the profile too: nothing else names the server."""
    pytest.importorskip("obstore")
    server, bucket = s3_server
    rest = f"region = eu-west-1\nendpoint_url = {server}\n"
    if said_in == "credentials":
        environ = files(f"[default]\n{ANOTHER}[mine]\n{KEYS}", f"[profile mine]\n{rest}", AWS_PROFILE="mine")
    else:
        environ = files("", f"[profile mine]\n{KEYS}{rest}", AWS_PROFILE="mine")
    use(environ)
    require_usable("s3://bucket/x")
    opened = opener("", tmp_path.name)
    placed = fill(opened, range(2))
    store, held = opened()
    try:
        assert by_place(held) == placed and (bucket / tmp_path.name / "node-1" / "alive").exists()
        buffer = bytearray(SHAPE.block_nbytes)
        assert store.read([(placed[0], cut(buffer))]) == [True]
        assert bytes(buffer) == content(placed[0].block.sequence)
    finally:
        store.close()


def test_replaced_keys_are_taken_up_and_broken_ones_cost_hits_not_the_process(
    s3_server: tuple[str, Path],
    tmp_path: Path,
    files: Callable[..., Environ],
    use: Callable[[Environ], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("obstore")
    caplog.set_level(logging.DEBUG)
    # Keys that end at once are asked for again before each request.
    monkeypatch.setattr(aws_profile, "REREAD_AFTER", -aws_profile.REREAD_AFTER)
    use(files(f"[mine]\n{ANOTHER}", AWS_PROFILE="mine"))
    opened = opener(s3_server[0], tmp_path.name)
    with pytest.raises(TierIOError) as refused:
        opened()
    assert "hidden" not in str(refused.value)
    files(f"[mine]\n{KEYS}")
    store, _ = opened()
    try:
        store.say_alive()
        files("[mine]\naws_access_key_id = half\n")
        with pytest.raises(TierIOError) as gone:
            store.say_alive()
        with pytest.raises(TierIOError):
            store.write(with_bytes(TierCatalog(8).plan_store(chain(prompt(1, 2))).writes))
        files(f"[mine]\n{KEYS}")
        store.say_alive()
    finally:
        store.close()
    told = str(gone.value) + caplog.text
    assert "AWS profile 'mine'" in told and SECRET not in told and "hidden" not in told


def test_region_and_endpoint_are_those_of_the_environment_then_of_the_profile(
    files: Callable[..., Environ], use: Callable[[Environ], None]
) -> None:
    pytest.importorskip("obstore")
    said = "region = eu-west-1\nendpoint_url = http://profile:9\n"
    use(files(f"[mine]\n{KEYS}{said}", AWS_PROFILE="mine"))
    assert remote._connect("s3://bucket/x", "").config.items() >= {
        ("region", "eu-west-1"),
        ("endpoint", "http://profile:9"),
    }
    use({"AWS_REGION": "us-west-2", "AWS_ENDPOINT_URL_S3": "http://environment:9"})
    found = remote._connect("s3://bucket/x", "").config
    # What is not said here the library takes from the environment itself.
    assert "region" not in found and found["endpoint"] == "http://environment:9"
    assert remote._connect("s3://bucket/x", "http://given:9").config["endpoint"] == "http://given:9"


def test_a_missing_profile_is_refused_before_the_store_is_asked(
    tmp_path: Path, files: Callable[..., Environ], use: Callable[[Environ], None]
) -> None:
    pytest.importorskip("obstore")
    use(files(f"[other]\n{KEYS}", AWS_PROFILE="mine"))
    with pytest.raises(AwsProfileError, match="AWS profile 'mine': it is neither in"):
        require_usable("s3://bucket/x")
    with pytest.raises(AwsProfileError, match="AWS profile 'mine'"):
        opener("http://127.0.0.1:1", "x")()
    # Other stores know no profile.
    require_usable(f"file://{tmp_path}")
    require_usable("gs://bucket/x")


def test_a_file_that_may_not_be_read_is_told(files: Callable[..., Environ], monkeypatch: pytest.MonkeyPatch) -> None:
    environ = files(f"[mine]\n{KEYS}", AWS_PROFILE="mine")

    def refuse(self: Path, mode: str) -> object:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(AwsProfileError, match="credentials: Permission denied"):
        find_profile(environ)
