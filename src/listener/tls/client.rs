//! The identity in a verified client certificate, read once per connection; also for certificates
//! given to `explain`.

use std::time::SystemTime;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use rustls::{
    CertificateError, Error,
    pki_types::{CertificateDer, UnixTime},
};
use sha2::{Digest as _, Sha256};
use x509_parser::{certificate::X509Certificate, extensions::GeneralName, prelude::FromDer as _};

use super::{
    TlsSettings,
    certificate::{FileFault, chain_of, moment},
};
use crate::identity::ClientCertificate;

/// A client certificate given to `explain`, with its chain.
#[derive(Clone, Debug)]
pub struct PresentedChain(Vec<CertificateDer<'static>>);

impl PresentedChain {
    /// Parses PEM, the client's own certificate first. Assumes that the client has its private key.
    pub fn parse(pem: &[u8]) -> Result<PresentedChain, FileFault> {
        let chain = chain_of(pem)?;
        for der in &chain {
            X509Certificate::from_der(der)
                .map_err(|_| FileFault::BadCertificate("it is damaged".to_owned()))?;
        }
        Ok(PresentedChain(chain))
    }

    /// The certificates as PEM, without any other content of the file.
    pub fn pem(&self) -> String {
        let mut pem = String::new();
        for der in &self.0 {
            let encoded = STANDARD.encode(der);
            pem.push_str("-----BEGIN CERTIFICATE-----\n");
            for line in encoded.as_bytes().chunks(64) {
                pem.push_str(&String::from_utf8_lossy(line));
                pem.push('\n');
            }
            pem.push_str("-----END CERTIFICATE-----\n");
        }
        pem
    }
}

/// Why a client with this certificate cannot send requests. The text is a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateRefusal {
    /// No listener asks for client certificates.
    #[error("no [[listen]] asks clients for a certificate; set client_ca in a [listen.tls]")]
    NotAsked,
    /// The handshake fails.
    #[error("the handshake with this certificate fails: {0}")]
    Refused(String),
}

impl TlsSettings {
    /// Verifies a certificate as a handshake would, and returns its holder.
    pub fn holder(
        &self,
        presented: &PresentedChain,
        now: SystemTime,
    ) -> Result<ClientCertificate, CertificateRefusal> {
        let verifier = self.material.client_verifier.as_ref();
        let verifier = verifier.ok_or(CertificateRefusal::NotAsked)?;
        let (first, others) = presented
            .0
            .split_first()
            .ok_or(CertificateRefusal::NotAsked)?;
        let since = now.duration_since(SystemTime::UNIX_EPOCH);
        let at = UnixTime::since_unix_epoch(since.unwrap_or_default());
        verifier
            .verify_client_cert(first, others, at)
            .map_err(|error| CertificateRefusal::Refused(why(&error)))?;
        holder(first, now)
            .ok_or_else(|| CertificateRefusal::Refused("it cannot be read".to_owned()))
    }
}

fn why(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "no CA in client_ca has signed it".to_owned()
        }
        Error::InvalidCertificate(error) => error.to_string(),
        error => error.to_string(),
    }
}

/// The certificate's fields; `None` if it is not valid now. It was valid when verified, but a
/// session resumed by a ticket may outlive it.
pub(super) fn holder(der: &CertificateDer<'_>, now: SystemTime) -> Option<ClientCertificate> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let validity = certificate.validity();
    if now < moment(validity.not_before) || now > moment(validity.not_after) {
        return None;
    }
    let common_names = certificate.subject().iter_common_name();
    let mut holder = ClientCertificate {
        common_names: common_names
            .map(|name| name.as_str().unwrap_or_default().to_owned())
            .collect(),
        fingerprint: fingerprint(der),
        ..ClientCertificate::default()
    };
    let alternatives = certificate.subject_alternative_name().ok()?;
    let alternatives = alternatives.map(|extension| &extension.value.general_names);
    for name in alternatives.into_iter().flatten() {
        match name {
            GeneralName::DNSName(name) => holder.dns_names.push(name.to_ascii_lowercase()),
            GeneralName::URI(uri) => holder.uris.push((*uri).to_owned()),
            _ => {}
        }
    }
    Some(holder)
}

/// SHA-256 of the certificate like `openssl x509 -fingerprint -sha256`, in lower case and without
/// colons.
fn fingerprint(der: &[u8]) -> String {
    Sha256::digest(der)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
