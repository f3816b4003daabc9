//! Credentials that identify users, one file for each kind.

mod api_key;
pub(super) mod client_cert;
mod header;
pub mod jwt;

use http::{HeaderMap, HeaderName, HeaderValue, header::AUTHORIZATION};

pub(super) use api_key::ApiKeys;
pub use api_key::KnownKeys;
pub(super) use header::UserHeader;
pub(super) use jwt::Jwt;

use super::address::trim;

/// The longest user, tier or tenant name in a header, token or certificate.
const NAME_MAX_BYTES: usize = 256;

/// The user that a credential identifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct User<'a> {
    pub(super) name: &'a str,
    pub(super) tier: Option<&'a str>,
    pub(super) tenant: Option<&'a str>,
    pub(super) token: Option<&'a jwt::Verified>,
}

/// Why a credential in the request is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CredentialFault {
    /// Well-formed but unknown. Does not tell whether it was once valid.
    Unknown,
    /// More than one credential: it is unclear which one is meant.
    Repeated,
    /// Empty, too long or badly formed.
    Malformed,
    /// A token whose signing key is unknown or ambiguous.
    UnknownKey,
    /// A token whose algorithm differs from that of its key.
    Algorithm,
    /// A token whose signature does not verify with the key that it names.
    Signature,
    /// A genuine token that has expired.
    Expired,
    /// A genuine token that is for another audience, not yet valid, or lacks a required claim.
    Claims,
    /// A token, but no verification keys are loaded.
    NoKeys,
}

impl CredentialFault {
    /// The metric label.
    pub(super) fn label(self) -> &'static str {
        match self {
            CredentialFault::Unknown => "unknown",
            CredentialFault::Repeated => "repeated",
            CredentialFault::Malformed => "malformed",
            CredentialFault::UnknownKey => "unknown_key",
            CredentialFault::Algorithm => "algorithm",
            CredentialFault::Signature => "signature",
            CredentialFault::Expired => "expired",
            CredentialFault::Claims => "claims",
            CredentialFault::NoKeys => "no_keys",
        }
    }
}

/// The only value of a field, trimmed; `None` if the field is absent.
fn one_value<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
) -> Result<Option<&'a [u8]>, CredentialFault> {
    let mut lines = headers.get_all(name).into_iter().map(HeaderValue::as_bytes);
    match (lines.next(), lines.next()) {
        (None, _) => Ok(None),
        (Some(line), None) => Ok(Some(trim(line))),
        (Some(_), Some(_)) => Err(CredentialFault::Repeated),
    }
}

/// The only secret in a field. In `Authorization` it follows `Bearer` (RFC 6750 §2.1), and other
/// schemes are ignored.
fn secret_in<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
) -> Result<Option<&'a [u8]>, CredentialFault> {
    let value = one_value(headers, name)?;
    Ok(match name == AUTHORIZATION {
        true => value.and_then(bearer),
        false => value,
    })
}

/// The text after the scheme `Bearer`, which is case-insensitive (RFC 9110 §11.1).
fn bearer(value: &[u8]) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer";
    let (scheme, rest) = value.split_at_checked(SCHEME.len())?;
    let stands_alone = matches!(rest, [] | [b' ' | b'\t', ..]);
    (scheme.eq_ignore_ascii_case(SCHEME) && stands_alone).then(|| trim(rest))
}
