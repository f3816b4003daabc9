//! The user that a credential identifies.

use super::jwt::Verified;

/// The user that a credential identifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::identity) struct User<'a> {
    pub(in crate::identity) name: &'a str,
    pub(in crate::identity) tier: Option<&'a str>,
    pub(in crate::identity) tenant: Option<&'a str>,
    pub(in crate::identity) token: Option<&'a Verified>,
}
