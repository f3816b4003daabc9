//! Core: identifies the client that a request is counted for.
//!
//! [`Identifier::identify`] turns a peer address and its headers into a [`Client`]. That is an
//! address that cannot be spoofed ([`address`]) and, if a credential verifies, a user.
//! [`KeyParts::key`](key::KeyParts::key) maps the client to its bucket. [`ManagedFields`] lists the
//! header fields that a client must not be able to send to the upstream.

pub mod address;
pub mod body;
pub mod key;
pub mod managed;
pub mod trusted;

mod client;
mod credential;
mod forwarded;
mod identifier;
mod key_part;
mod rejected;
mod settings;
mod text;

pub use address::{AddressSource, Prefixes};
pub use body::{BodyFields, BodyFormat};
pub use client::Client;
pub use credential::{
    ApiKey, CertificateField, ClientCertificate, Credential, KnownKeys, OnInvalid,
    jwt::{
        self, ClaimRules, HeldToken, KeyRing, KeySet, KeySource, KeysUrl, TokenCache, TokenSource,
        TokenWorkspace,
    },
};
pub use identifier::{CredentialOutcome, Identifier, IdentityStep};
pub use key::{KeyHasher, KeyParts, KeySubject, Keyed, Missing};
pub use key_part::{KeyPart, KeyPartRecord, NamedPart, PartNeeds, PartOrigin};
pub use managed::ManagedFields;
pub use rejected::Rejected;
pub use settings::{IdentitySettings, UserSource};
pub use trusted::TrustedProxies;

#[cfg(test)]
mod tests;
