//! Where users come from: one file for each kind of credential.

mod api_key;
mod header;

use http::{HeaderMap, HeaderName, HeaderValue};

pub(super) use api_key::ApiKeys;
pub(super) use header::UserHeader;

use super::address::trim;

/// The longest name of a user, tier or tenant that a header may carry.
const NAME_MAX_BYTES: usize = 256;

/// Whom a credential stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct User<'a> {
    pub(super) name: &'a str,
    pub(super) tier: Option<&'a str>,
    pub(super) tenant: Option<&'a str>,
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
}

impl Fault {
    /// A word for the metric's label.
    pub(super) fn label(self) -> &'static str {
        match self {
            Fault::Unknown => "unknown",
            Fault::Repeated => "repeated",
            Fault::Malformed => "malformed",
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
