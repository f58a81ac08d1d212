"""Reads a profile as Amazon's own tools keep it: keys, region and endpoint, for the remote tier.

The object-store library takes keys from the environment and from the machine's identity, and knows no profiles. Those
that hold keys are read here; what else a profile may name (single sign-on, roles, programs that print keys) needs
Amazon's own library, and is refused with a sentence instead of being passed over.

A1: the order is that of Amazon's tools: keys in the environment, then a token file for a web identity unless a profile
    is named, then the profile, then the machine. Region and endpoint: what the environment says, then the profile.
A2: a profile that is named must be there and whole; the one named `default` need not be. Where nobody names one, files
    that this process may not read are not there, and where the environment has keys, what a profile has is not asked.
A3: no key is ever in an error, a log line or a `repr`; nor is a line of these files, for it may hold one.
A4: keys are read again before long, so that replacing them in their file needs no restart.
"""

import configparser
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from kv_prefix.tiers.errors import AwsProfileError

REREAD_AFTER: Final = timedelta(minutes=10)
FILE_BYTES_MAX: Final = 1 << 20
DEFAULT: Final = "default"

_NOT_READ: Final = (
    "credential_process",
    "credential_source",
    "role_arn",
    "source_profile",
    "sso_session",
    "sso_start_url",
    "web_identity_token_file",
)

Section = dict[str, str]


@dataclass(frozen=True, slots=True)
class AwsKeys:
    """What signs a request. `token` is empty for keys that do not end."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class AwsProfile:
    """What a profile says; empty where it says nothing.

    Attributes:
        keys: None when they are to come from elsewhere: the environment or the machine.
    """

    name: str
    keys: AwsKeys | None
    region: str
    endpoint_url: str


def find_profile(environ: Mapping[str, str]) -> AwsProfile | None:
    """The profile that the environment means; None without one.

    Args:
        environ: AWS_PROFILE (or AWS_DEFAULT_PROFILE) names it; AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE are
            where it is looked for instead of below ~/.aws.

    Raises:
        AwsProfileError: it is named and not there or not readable, holds half a pair of keys or none that can be read
            here, or a file is no such file.
    """
    named = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or ""
    name = named or DEFAULT
    credentials = _path(environ, "AWS_SHARED_CREDENTIALS_FILE", "credentials")
    config = _path(environ, "AWS_CONFIG_FILE", "config")
    in_credentials = _read(credentials, name, must=bool(named)).get(name)
    sections = _read(config, name, must=bool(named))
    in_config = sections.get(f"profile {name}", sections.get(name) if name == DEFAULT else None)
    if in_credentials is None and in_config is None:
        if named:
            raise AwsProfileError(profile=name, reason=f"it is neither in {credentials} nor in {config}")
        return None
    said = (in_config or {}) | (in_credentials or {})
    keys = None
    if not (environ.get("AWS_ACCESS_KEY_ID") or (environ.get("AWS_WEB_IDENTITY_TOKEN_FILE") and not named)):
        keys = _keys(name, credentials, in_credentials or {}) or _keys(name, config, in_config or {})
        if keys is None and named:
            raise AwsProfileError(profile=name, reason=_why_no_keys(said, credentials, config))
    return AwsProfile(name, keys, said.get("region", ""), said.get("endpoint_url", ""))


@dataclass(frozen=True, slots=True)
class ProfileKeys:
    """Gives an `obstore` store its keys, again and again (A4); its form of a credential provider."""

    environ: Mapping[str, str]

    def __call__(self) -> dict[str, object]:
        """Keys, and until when they may be used before this is asked again.

        Raises:
            AwsProfileError: the profile has gone, or is broken.
        """
        profile = find_profile(self.environ)
        if profile is None or profile.keys is None:
            raise AwsProfileError(profile=profile.name if profile else DEFAULT, reason="its keys are gone")
        keys = profile.keys
        return {
            "access_key_id": keys.access_key_id,
            "secret_access_key": keys.secret_access_key,
            "token": keys.token or None,
            "expires_at": datetime.now(UTC) + REREAD_AFTER,
        }


def _keys(name: str, file: Path, section: Section) -> AwsKeys | None:
    pair = "aws_access_key_id", "aws_secret_access_key"
    given = [word for word in pair if section.get(word)]
    if not given:
        return None
    if len(given) == 1:
        (missing,) = set(pair) - set(given)
        raise AwsProfileError(profile=name, reason=f"{file} has its {given[0]} and no {missing}")
    return AwsKeys(section[pair[0]], section[pair[1]], section.get("aws_session_token", ""))


def _why_no_keys(said: Section, credentials: Path, config: Path) -> str:
    other = [word for word in _NOT_READ if word in said]
    if not other:
        return f"it has no aws_access_key_id, neither in {credentials} nor in {config}"
    return (
        f"it has no keys but {' and '.join(other)} ({config}), which is not followed here: put the keys into the "
        "environment, as `aws configure export-credentials --format env` prints them"
    )


def _path(environ: Mapping[str, str], variable: str, name: str) -> Path:
    path = Path(environ.get(variable) or f"~/.aws/{name}")
    try:
        return path.expanduser()
    except RuntimeError:
        # A user without a home folder, as in many containers: there is no such file then.
        return path


def _read(file: Path, profile: str, *, must: bool) -> dict[str, Section]:
    """The sections of a file by their names; none if there is no such file, or it cannot be read and need not be."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        if not must:
            return {}
        raise AwsProfileError(profile=profile, reason=f"{file}: {error.strerror or type(error).__name__}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise AwsProfileError(profile=profile, reason=f"{file}: more than {FILE_BYTES_MAX} bytes")
    return _parse(raw, file, profile)


def _parse(raw: bytes, file: Path, profile: str) -> dict[str, Section]:
    # No section may lend its values to others, and no sign in a key means anything.
    parser = configparser.RawConfigParser(default_section="", strict=False, inline_comment_prefixes=None)
    try:
        parser.read_string(raw.decode())
    except UnicodeDecodeError:
        raise AwsProfileError(profile=profile, reason=f"{file}: expected UTF-8 text") from None
    except configparser.Error as error:
        # Its own sentence quotes the line.
        raise AwsProfileError(profile=profile, reason=f"{file}: line {_line(error)} is not understood") from None
    except ValueError as error:
        raise AwsProfileError(profile=profile, reason=f"{file}: {type(error).__name__}") from None
    return {_section_name(name): dict(parser.items(name)) for name in parser.sections()}


def _section_name(name: str) -> str:
    """`profile x` for `[profile x]`, also where x stands in quotes or behind more spaces."""
    first, _, rest = name.strip().partition(" ")
    return f"profile {rest.strip().strip(chr(34) + chr(39))}" if first == "profile" and rest else name.strip()


def _line(error: configparser.Error) -> int:
    lines = getattr(error, "errors", None)
    return int(lines[0][0] if lines else getattr(error, "lineno", None) or 0)
