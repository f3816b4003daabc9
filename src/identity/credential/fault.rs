//! Why a credential is not accepted.

/// Why a credential in the request is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::identity) enum CredentialFault {
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
    pub(in crate::identity) fn label(self) -> &'static str {
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
