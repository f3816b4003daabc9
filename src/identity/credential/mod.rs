//! Credentials that identify users, one file for each kind.

mod api_key;
pub(super) mod client_cert;
mod fault;
mod header;
pub mod jwt;
mod kind;
mod user;
mod value;

pub(super) use api_key::ApiKeys;
pub use api_key::{ApiKey, KnownKeys};
pub use client_cert::{CertificateField, ClientCertificate};
pub(super) use fault::CredentialFault;
pub(super) use header::UserHeader;
pub use kind::{Credential, OnInvalid};
pub(super) use user::User;
