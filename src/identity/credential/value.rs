//! A credential as it stands in a header field.

use http::{HeaderMap, HeaderName, HeaderValue, header::AUTHORIZATION};

use super::fault::CredentialFault;
use crate::identity::address::trim;

/// The longest user, tier or tenant name in a header, token or certificate.
pub(super) const NAME_MAX_BYTES: usize = 256;

/// The only value of a field, trimmed; `None` if the field is absent.
pub(super) fn one_value<'a>(
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
pub(super) fn secret_in<'a>(
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
