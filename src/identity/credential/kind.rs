//! The kinds of credentials, and what happens to one that does not verify.

/// How to treat a credential that does not verify.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnInvalid {
    /// Answer 401.
    #[default]
    Reject,
    /// Continue as if the request carried no credential.
    Anonymous,
}

/// The kind of credential that a client presented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credential {
    /// An API key in `Authorization`.
    Bearer,
    /// An API key in another header.
    ApiKey,
    /// A JSON Web Token.
    Token,
    /// A header set by a trusted proxy.
    Header,
    /// A client certificate from the TLS handshake.
    ClientCert,
}

impl Credential {
    /// The metric label: the `from` of the `[[user]]` table.
    pub fn label(self) -> &'static str {
        match self {
            Credential::Bearer | Credential::ApiKey => "api_key",
            Credential::Token => "jwt",
            Credential::Header => "header",
            Credential::ClientCert => "client_cert",
        }
    }

    /// All metric labels for what can be wrong with it.
    pub fn faults(self) -> &'static [&'static str] {
        match self {
            Credential::Token => &[
                "malformed",
                "repeated",
                "unknown_key",
                "algorithm",
                "signature",
                "expired",
                "claims",
                "no_keys",
            ],
            _ => &["unknown", "repeated", "malformed"],
        }
    }
}
