//! Where users come from: one file for each kind of credential.

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

/// The longest name of a user, tier or tenant that a header, a token or a certificate may carry.
const NAME_MAX_BYTES: usize = 256;

/// Whom a credential stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct User<'a> {
    pub(super) name: &'a str,
    pub(super) tier: Option<&'a str>,
    pub(super) tenant: Option<&'a str>,
    pub(super) token: Option<&'a jwt::Verified>,
}

/// Why a credential that is there does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Well-formed, but it stands for nobody. Never says whether it once did.
    Unknown,
    /// More than one: which is meant is anybody's guess, so it is nobody's.
    Repeated,
    /// Empty, too long, or made of what it cannot be made of.
    Malformed,
    /// A token signed with a key that is not known, or that could be one of several.
    UnknownKey,
    /// A token whose algorithm is not that of its key.
    Algorithm,
    /// A token that was not signed with the key that it names.
    Signature,
    /// A genuine token whose time is over.
    Expired,
    /// A genuine token that is for somebody else, not yet valid, or without a claim that it needs.
    Claims,
    /// A token, while there are no keys to verify it with.
    NoKeys,
}

impl Fault {
    /// A word for the metric's label.
    pub(super) fn label(self) -> &'static str {
        match self {
            Fault::Unknown => "unknown",
            Fault::Repeated => "repeated",
            Fault::Malformed => "malformed",
            Fault::UnknownKey => "unknown_key",
            Fault::Algorithm => "algorithm",
            Fault::Signature => "signature",
            Fault::Expired => "expired",
            Fault::Claims => "claims",
            Fault::NoKeys => "no_keys",
        }
    }
}

/// The one value of a field, without the whitespace around it; `None` when the field is absent.
fn one_value<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a [u8]>, Fault> {
    let mut lines = headers.get_all(name).into_iter().map(HeaderValue::as_bytes);
    match (lines.next(), lines.next()) {
        (None, _) => Ok(None),
        (Some(line), None) => Ok(Some(trim(line))),
        (Some(_), Some(_)) => Err(Fault::Repeated),
    }
}

/// The one secret in a field. In `Authorization` it stands behind `Bearer` (RFC 6750 §2.1), and other schemes are none.
fn secret_in<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a [u8]>, Fault> {
    let value = one_value(headers, name)?;
    Ok(match name == AUTHORIZATION {
        true => value.and_then(bearer),
        false => value,
    })
}

/// What follows the scheme `Bearer`, in any case (RFC 9110 §11.1).
fn bearer(value: &[u8]) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer";
    let (scheme, rest) = value.split_at_checked(SCHEME.len())?;
    let stands_alone = matches!(rest, [] | [b' ' | b'\t', ..]);
    (scheme.eq_ignore_ascii_case(SCHEME) && stands_alone).then(|| trim(rest))
}
