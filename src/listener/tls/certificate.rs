//! Loads certificate and key files for a listener, or lists everything that is wrong with them.
//!
//! The config compiler and the reload of a running listener share this code, so a listener accepts
//! whatever `check` accepts.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use rustls::{
    RootCertStore,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{self, PemObject as _},
    },
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
    sign::CertifiedKey,
};
use sha2::{Digest as _, Sha256};
use x509_parser::{
    certificate::X509Certificate, extensions::GeneralName, prelude::FromDer as _, time::ASN1Time,
};

/// Paths of certificates and keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// At least one. The first serves clients that send no server name or an unknown one.
    pub certificates: Vec<CertificatePair>,
    /// CAs of client certificates, and whether a client needs a certificate.
    pub client_ca: Option<(LabeledFile, ClientAuth)>,
}

/// A certificate and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificatePair {
    /// The certificate, followed by its chain.
    pub cert: LabeledFile,
    /// Its private key.
    pub key: LabeledFile,
}

/// A file and its display name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabeledFile {
    /// Its path.
    pub path: PathBuf,
    /// As written in the configuration; the label of its metric.
    pub name: String,
}

/// Whether a client needs a certificate. A presented certificate is always verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientAuth {
    /// A client without one is served as anonymous.
    #[default]
    Optional,
    /// A client without one is rejected in the handshake.
    Required,
}

/// The validated content of [`CertificateFiles`].
#[derive(Clone, Debug)]
pub struct CertificateMaterial {
    pub(super) certificates: Vec<ServerCertificate>,
    pub(super) client_verifier: Option<Arc<dyn ClientCertVerifier>>,
    /// Validity period of each file.
    pub validity: Vec<Validity>,
    pub(super) digests: Digests,
}

/// Digests of the files, to notice changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Digests {
    /// All files.
    pub(super) all: [u8; 32],
    /// The CAs of client certificates alone.
    pub(super) client_ca: [u8; 32],
}

/// When all certificates of a file are valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The name of the file.
    pub name: String,
    /// Start.
    pub not_before: SystemTime,
    /// End.
    pub not_after: SystemTime,
}

impl Validity {
    /// Warns if the file is not valid, or not for long: a phrase that follows its name. `None` if
    /// it is fine.
    pub fn warning(&self, now: SystemTime) -> Option<String> {
        /// Enough time to find the person who can renew it; below the 30 days at which renewal is
        /// usually due.
        const SOON: Duration = Duration::from_secs(14 * 24 * 3600);
        let date = |at| crate::telemetry::date(at);
        if now >= self.not_after {
            Some(format!("expired on {}", date(self.not_after)))
        } else if now < self.not_before {
            Some(format!("is not valid before {}", date(self.not_before)))
        } else if now + SOON >= self.not_after {
            Some(format!("expires on {}", date(self.not_after)))
        } else {
            None
        }
    }
}

/// A server certificate.
#[derive(Clone, Debug)]
pub(super) struct ServerCertificate {
    pub(super) key: Arc<CertifiedKey>,
    /// Its names in lower case; `*.` stands for one label.
    pub(super) names: Vec<String>,
}

/// One error in [`CertificateFiles`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateProblem {
    /// The file concerned.
    pub place: CertificateFile,
    /// The error.
    pub fault: FileFault,
}

/// One of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertificateFile {
    /// Certificate of the pair with this index.
    Cert(usize),
    /// Key of the pair with this index.
    Key(usize),
    /// CAs of client certificates.
    ClientCa,
}

/// The error in a file, as a phrase that follows the file's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileFault {
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// It is not valid PEM.
    #[error("is not valid PEM")]
    NotPem,
    /// It contains no `BEGIN CERTIFICATE`.
    #[error("contains no certificate")]
    NoCertificate,
    /// A certificate in it is unusable.
    #[error("contains an unusable certificate: {0}")]
    BadCertificate(String),
    /// It contains no `BEGIN PRIVATE KEY`.
    #[error("contains no private key")]
    NoKey,
    /// The key is encrypted with a passphrase.
    #[error("contains an encrypted private key")]
    EncryptedKey,
    /// The key type is not supported, or the key is damaged.
    #[error("contains an unusable private key: {0}")]
    BadKey(String),
    /// The key belongs to another certificate.
    #[error("is not the key of the certificate")]
    Mismatch,
}

/// Reads a file; the error is a phrase that continues "cannot be read: ".
pub type Read<'a> = &'a dyn Fn(&Path) -> Result<Vec<u8>, String>;

impl CertificateFiles {
    /// Reads and validates all files. Blocks on the disk.
    pub fn load(&self, read: Read<'_>) -> Result<CertificateMaterial, Vec<CertificateProblem>> {
        let mut reading = Reading {
            read,
            all: Sha256::new(),
            problems: Vec::new(),
        };
        let mut certificates = Vec::with_capacity(self.certificates.len());
        let mut validity = Vec::new();
        for (index, pair) in self.certificates.iter().enumerate() {
            if let Some((certificate, valid)) = reading.certificate(index, pair) {
                certificates.push(certificate);
                validity.push(valid);
            }
        }
        let mut client_verifier = None;
        let mut client_ca = [0; 32];
        if let Some((file, auth)) = &self.client_ca
            && let Some((verifier, valid, digest)) = reading.client_ca(file, *auth)
        {
            client_verifier = Some(verifier);
            validity.push(valid);
            client_ca = digest;
        }
        if !reading.problems.is_empty() {
            return Err(reading.problems);
        }
        Ok(CertificateMaterial {
            certificates,
            client_verifier,
            validity,
            digests: Digests {
                all: reading.all.finalize().into(),
                client_ca,
            },
        })
    }

    /// Digest of all files as they are now, unreadable ones included. Blocks on the disk.
    pub(super) fn digest(&self, read: Read<'_>) -> [u8; 32] {
        let mut all = Sha256::new();
        for file in self.in_order() {
            update_digest(&mut all, &read(&file.path).unwrap_or_default());
        }
        all.finalize().into()
    }

    /// Display name of a file.
    pub fn name(&self, place: CertificateFile) -> &str {
        let file = match place {
            CertificateFile::Cert(index) => self.certificates.get(index).map(|pair| &pair.cert),
            CertificateFile::Key(index) => self.certificates.get(index).map(|pair| &pair.key),
            CertificateFile::ClientCa => self.client_ca.as_ref().map(|(file, _)| file),
        };
        file.map_or("", |file| &file.name)
    }

    fn in_order(&self) -> impl Iterator<Item = &LabeledFile> {
        let pairs = self.certificates.iter();
        let authorities = self.client_ca.iter().map(|(file, _)| file);
        pairs
            .flat_map(|pair| [&pair.cert, &pair.key])
            .chain(authorities)
    }
}

/// Includes the length, so that bytes moved from one file to the next change the digest.
fn update_digest(all: &mut Sha256, bytes: &[u8]) {
    all.update((bytes.len() as u64).to_le_bytes());
    all.update(bytes);
}

struct Reading<'a> {
    read: Read<'a>,
    all: Sha256,
    problems: Vec<CertificateProblem>,
}

impl Reading<'_> {
    fn bytes(&mut self, place: CertificateFile, file: &LabeledFile) -> Option<Vec<u8>> {
        let bytes = (self.read)(&file.path).map_err(FileFault::Unreadable);
        let bytes = self.record_fault(place, bytes)?;
        update_digest(&mut self.all, &bytes);
        Some(bytes)
    }

    fn record_fault<T>(
        &mut self,
        place: CertificateFile,
        outcome: Result<T, FileFault>,
    ) -> Option<T> {
        outcome
            .map_err(|fault| self.problems.push(CertificateProblem { place, fault }))
            .ok()
    }

    fn certificate(
        &mut self,
        index: usize,
        pair: &CertificatePair,
    ) -> Option<(ServerCertificate, Validity)> {
        let place = CertificateFile::Cert(index);
        let chain = self.bytes(place, &pair.cert);
        let chain = chain.and_then(|bytes| self.record_fault(place, chain_of(&bytes)));
        let read = chain.and_then(|chain| {
            let read = described(&chain, &pair.cert.name).map(|read| (chain, read));
            self.record_fault(place, read)
        });
        let place = CertificateFile::Key(index);
        let key = self.bytes(place, &pair.key);
        let key = key.and_then(|bytes| self.record_fault(place, key_of(&bytes)));
        let ((chain, (names, validity)), key) = (read?, key?);
        let key = self.record_fault(place, certified(chain, key))?;
        Some((ServerCertificate { key, names }, validity))
    }

    fn client_ca(
        &mut self,
        file: &LabeledFile,
        auth: ClientAuth,
    ) -> Option<(Arc<dyn ClientCertVerifier>, Validity, [u8; 32])> {
        let place = CertificateFile::ClientCa;
        let bytes = self.bytes(place, file)?;
        let authorities = self.record_fault(place, chain_of(&bytes))?;
        let valid = described(&authorities, &file.name);
        let (_, valid) = self.record_fault(place, valid)?;
        let verifier = self.record_fault(place, verifier(authorities, auth))?;
        Some((verifier, valid, Sha256::digest(&bytes).into()))
    }
}

/// The TLS crypto provider of this project, independent of the process-wide default.
pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

pub(super) fn chain_of(bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, FileFault> {
    let chain: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(bytes).collect();
    let chain = chain.map_err(|_| FileFault::NotPem)?;
    match chain.is_empty() {
        true => Err(FileFault::NoCertificate),
        false => Ok(chain),
    }
}

fn key_of(bytes: &[u8]) -> Result<PrivateKeyDer<'static>, FileFault> {
    let has = |label: &str| bytes.windows(label.len()).any(|w| w == label.as_bytes());
    if has("BEGIN ENCRYPTED PRIVATE KEY") || has("Proc-Type: 4,ENCRYPTED") {
        return Err(FileFault::EncryptedKey);
    }
    PrivateKeyDer::from_pem_slice(bytes).map_err(|error| match error {
        pem::Error::NoItemsFound => FileFault::NoKey,
        _ => FileFault::NotPem,
    })
}

fn certified(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Arc<CertifiedKey>, FileFault> {
    CertifiedKey::from_der(chain, key, &provider())
        .map(Arc::new)
        .map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => FileFault::Mismatch,
            error => FileFault::BadKey(error.to_string()),
        })
}

fn verifier(
    authorities: Vec<CertificateDer<'static>>,
    auth: ClientAuth,
) -> Result<Arc<dyn ClientCertVerifier>, FileFault> {
    let bad = |error: &dyn std::fmt::Display| FileFault::BadCertificate(error.to_string());
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority).map_err(|error| bad(&error))?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
    let verifier = match auth {
        ClientAuth::Optional => verifier.allow_unauthenticated(),
        ClientAuth::Required => verifier,
    };
    verifier.build().map_err(|error| bad(&error))
}

/// Names of the first certificate, and the validity of all.
fn described(
    chain: &[CertificateDer<'static>],
    name: &str,
) -> Result<(Vec<String>, Validity), FileFault> {
    let mut names = Vec::new();
    let mut validity = Validity {
        name: name.to_owned(),
        not_before: SystemTime::UNIX_EPOCH,
        not_after: SystemTime::UNIX_EPOCH,
    };
    for (index, der) in chain.iter().enumerate() {
        let (_, certificate) = X509Certificate::from_der(der)
            .map_err(|_| FileFault::BadCertificate("it is damaged".to_owned()))?;
        let from = moment(certificate.validity().not_before);
        let until = moment(certificate.validity().not_after);
        validity.not_before = validity.not_before.max(from);
        validity.not_after = if index == 0 {
            until
        } else {
            validity.not_after.min(until)
        };
        if index == 0 {
            names = names_of(&certificate);
        }
    }
    Ok((names, validity))
}

/// DNS names; if it has none, as with some internal CAs, its common name.
fn names_of(certificate: &X509Certificate<'_>) -> Vec<String> {
    let alternatives = certificate.subject_alternative_name().ok().flatten();
    let alternatives = alternatives.map(|extension| &extension.value.general_names);
    let dns: Vec<String> = alternatives
        .into_iter()
        .flatten()
        .filter_map(|name| match name {
            GeneralName::DNSName(name) => Some(name.to_ascii_lowercase()),
            _ => None,
        })
        .collect();
    if !dns.is_empty() {
        return dns;
    }
    let common = certificate.subject().iter_common_name();
    common
        .filter_map(|name| name.as_str().ok())
        .map(str::to_ascii_lowercase)
        .collect()
}

/// Times before 1970 become 1970.
pub(super) fn moment(time: ASN1Time) -> SystemTime {
    let seconds = u64::try_from(time.timestamp()).unwrap_or(0);
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}
