//! TLS of a listener: certificates, versions, client authentication.
//!
//! All handshake state is one immutable `ServerConfig`. A reload builds a new one and swaps it in
//! whole. A handshake sees the old files or the new ones, never a mix, and open connections keep
//! theirs.
//!
//! Sessions are resumed by tickets that only this listener of this process can read (RFC 8446 §2.2,
//! RFC 5077), so the server keeps no session state. A ticket stands for a client certificate
//! verified earlier, so a change of `client_ca` invalidates all tickets. Early data (0-RTT) is
//! refused, as it could be replayed (RFC 8470).
//!
//! Client authentication is a property of the listener, not of a name. So no name of a listener
//! needs less proof than another, whatever SNI, `Host` or `:authority` say. A request for another
//! name than that of the handshake is served, and 421 (RFC 9110 §15.5.20) is never needed.

mod by_name;
pub mod certificate;
mod client;
mod handshake;

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use rustls::{
    ServerConfig, SupportedProtocolVersion,
    crypto::aws_lc_rs::Ticketer,
    server::{NoServerSessionStorage, ProducesTickets},
    version::{TLS12, TLS13},
};

use by_name::ByName;
use certificate::{
    CertificateFiles, CertificateMaterial, CertificateProblem, Digests, Read, provider,
};

pub use client::{CertificateRefusal, PresentedChain};
pub use handshake::Handshakes;

/// `[listen.tls]`.
#[derive(Clone, Debug)]
pub struct TlsSettings {
    /// Paths of the certificates.
    pub files: CertificateFiles,
    /// Their content when the configuration was checked.
    pub material: CertificateMaterial,
    /// Oldest accepted version.
    pub min_version: MinVersion,
    /// Most handshakes in progress per worker.
    pub max_handshakes: usize,
}

/// Oldest accepted version of TLS. Versions before 1.2 are broken (RFC 8996).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MinVersion {
    /// TLS 1.2 (RFC 5246), with forward secrecy and authenticated encryption only.
    #[default]
    Tls12,
    /// TLS 1.3 (RFC 8446).
    Tls13,
}

/// TLS of one listener, shared by the workers.
#[derive(Debug)]
pub struct ListenerTls {
    settings: TlsSettings,
    http2: bool,
    current: ArcSwap<ServerConfig>,
    loaded: Mutex<LoadedTls>,
}

#[derive(Debug)]
struct LoadedTls {
    /// Digests of the files in `current`.
    digests: Digests,
    tickets: Arc<dyn ProducesTickets>,
    /// Digest of the last rejected files, so that each is reported once.
    refused: Option<[u8; 32]>,
}

/// Why TLS cannot be set up or reloaded.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The files are unusable.
    #[error("{}", list(.0))]
    Files(Vec<(String, CertificateProblem)>),
    /// The system provides no entropy.
    #[error("{0}")]
    System(#[from] rustls::Error),
}

fn list(problems: &[(String, CertificateProblem)]) -> String {
    let shown =
        |(name, problem): &(String, CertificateProblem)| format!("{name} {}", problem.fault);
    problems.iter().map(shown).collect::<Vec<_>>().join("; ")
}

impl ListenerTls {
    /// Uses the material checked with the configuration. `http2`: whether ALPN offers it (RFC
    /// 7301).
    pub fn new(settings: TlsSettings, http2: bool) -> Result<Self, SetupError> {
        let tickets = Ticketer::new()?;
        let config = server_config(&settings, &settings.material, http2, &tickets)?;
        Ok(Self {
            current: ArcSwap::from_pointee(config),
            loaded: Mutex::new(LoadedTls {
                digests: settings.material.digests,
                tickets,
                refused: None,
            }),
            settings,
            http2,
        })
    }

    /// Whether it has these settings, regardless of the current content of the files.
    pub fn serves(&self, settings: &TlsSettings, http2: bool) -> bool {
        let own = &self.settings;
        own.files == settings.files
            && own.min_version == settings.min_version
            && own.max_handshakes == settings.max_handshakes
            && self.http2 == http2
    }

    /// Reads the files again, and uses them if they changed and are all valid: `Some` with their
    /// content. Otherwise keeps the old ones; returns an error once for each content. Blocks on the
    /// disk.
    pub fn reload(&self, read: Read<'_>) -> Result<Option<CertificateMaterial>, SetupError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.settings.files.digest(read);
        if now == loaded.digests.all || loaded.refused == Some(now) {
            return Ok(None);
        }
        loaded.refused = Some(now);
        let material = self.settings.files.load(read);
        let material = material.map_err(|problems| SetupError::Files(self.named(problems)))?;
        let tickets = match material.digests.client_ca == loaded.digests.client_ca {
            true => Arc::clone(&loaded.tickets),
            false => Ticketer::new()?,
        };
        let config = server_config(&self.settings, &material, self.http2, &tickets)?;
        self.current.store(Arc::new(config));
        *loaded = LoadedTls {
            digests: material.digests,
            tickets,
            refused: None,
        };
        Ok(Some(material))
    }

    fn named(&self, problems: Vec<CertificateProblem>) -> Vec<(String, CertificateProblem)> {
        let name =
            |problem: &CertificateProblem| self.settings.files.name(problem.place).to_owned();
        problems
            .into_iter()
            .map(|problem| (name(&problem), problem))
            .collect()
    }
}

fn server_config(
    settings: &TlsSettings,
    material: &CertificateMaterial,
    http2: bool,
    tickets: &Arc<dyn ProducesTickets>,
) -> Result<ServerConfig, rustls::Error> {
    const BOTH: &[&SupportedProtocolVersion] = &[&TLS13, &TLS12];
    const NEWEST: &[&SupportedProtocolVersion] = &[&TLS13];
    let versions = match settings.min_version {
        MinVersion::Tls12 => BOTH,
        MinVersion::Tls13 => NEWEST,
    };
    let config =
        ServerConfig::builder_with_provider(provider()).with_protocol_versions(versions)?;
    let config = match &material.client_verifier {
        Some(verifier) => config.with_client_cert_verifier(Arc::clone(verifier)),
        None => config.with_no_client_auth(),
    };
    let mut config = config.with_cert_resolver(Arc::new(ByName::new(&material.certificates)));
    let protocols: &[&[u8]] = match http2 {
        true => &[b"h2", b"http/1.1"],
        false => &[b"http/1.1"],
    };
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    config.ticketer = Arc::clone(tickets);
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(config)
}
