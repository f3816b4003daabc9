//! A request whose credential does not verify.

use super::{
    client::Client,
    credential::{Credential, CredentialFault},
};

/// A credential that does not verify. Answer 401 with a body that does not distinguish an unknown
/// key from a revoked one. `source` and `kind` are small closed sets, safe as metric labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// The client without a user, because failed guesses are counted by address.
    pub client: Client<'static>,
    /// How the client tried to identify itself.
    pub source: Credential,
    /// One of [`Credential::faults`].
    pub kind: &'static str,
}

impl Rejected {
    /// The `WWW-Authenticate` value (RFC 9110 §11.6.1). `ApiKey` and `ClientCertificate` are not
    /// registered schemes, but the field may not be empty. For a token, the error code is one of
    /// RFC 6750 §3.1. Saying that a token has expired leaks nothing, because only genuine tokens
    /// get that far.
    pub fn challenge(&self) -> &'static str {
        match self.source {
            Credential::Bearer => "Bearer",
            Credential::ApiKey | Credential::Header => "ApiKey",
            Credential::ClientCert => "ClientCertificate",
            Credential::Token if self.kind == CredentialFault::Expired.label() => {
                r#"Bearer error="invalid_token", error_description="The token has expired""#
            }
            Credential::Token => r#"Bearer error="invalid_token""#,
        }
    }
}
