//! TLS on a listener: which certificate, which version, who the client is.
//!
//! Everything that a handshake needs is one immutable `ServerConfig`. A reload builds another and swaps it in whole, so
//! a handshake sees the old files or the new ones, never some of each, and open connections keep what they began with.
//!
//! Sessions are resumed by tickets that only this listener of this process can read (RFC 8446 §2.2, RFC 5077): nothing is
//! held for a client that is away. A ticket stands for a client certificate that was verified then, so tickets from before
//! a change of `client_ca` are worth nothing after it. Early data (0-RTT) is refused: it could be replayed (RFC 8470).
//!
//! Whether clients need a certificate is a property of the listener, not of a name: no name of a listener can be reached
//! with less proof than another, whatever SNI says and whatever a later `Host` or `:authority` says. So a request for a
//! name other than that of the handshake is served, and 421 (RFC 9110 §15.5.20) is never needed.

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
use certificate::{Digests, Files, Material, Problem, Read, provider};

pub use client::{NotTaken, Presented};
pub use handshake::Handshakes;

/// `[listen.tls]`.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where the certificates are.
    pub files: Files,
    /// What was in them when the configuration was checked.
    pub material: Material,
    /// The oldest version that is spoken.
    pub min_version: MinVersion,
    /// Handshakes that may be under way at once, on each worker.
    pub max_handshakes: usize,
}

/// The oldest version of TLS that is spoken. Older ones than these are broken (RFC 8996).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MinVersion {
    /// TLS 1.2 (RFC 5246), with forward secrecy and authenticated encryption only.
    #[default]
    Tls12,
    /// TLS 1.3 (RFC 8446).
    Tls13,
}

/// TLS on one listener, shared by the workers.
#[derive(Debug)]
pub struct Tls {
    settings: Settings,
    http2: bool,
    current: ArcSwap<ServerConfig>,
    loaded: Mutex<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    /// What `current` was made of.
    digests: Digests,
    tickets: Arc<dyn ProducesTickets>,
    /// What could not be taken up, to be said once only.
    refused: Option<[u8; 32]>,
}

/// Why TLS cannot be set up or reloaded.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The files cannot be used.
    #[error("{}", list(.0))]
    Files(Vec<(String, Problem)>),
    /// The system has no entropy to give.
    #[error("{0}")]
    System(#[from] rustls::Error),
}

fn list(problems: &[(String, Problem)]) -> String {
    let shown = |(name, problem): &(String, Problem)| format!("{name} {}", problem.fault);
    problems.iter().map(shown).collect::<Vec<_>>().join("; ")
}

impl Tls {
    /// Takes up the material that the configuration was checked with. `http2`: whether it is offered (RFC 7301).
    pub fn new(settings: Settings, http2: bool) -> Result<Self, SetupError> {
        let tickets = Ticketer::new()?;
        let config = server_config(&settings, &settings.material, http2, &tickets)?;
        Ok(Self {
            current: ArcSwap::from_pointee(config),
            loaded: Mutex::new(Loaded {
                digests: settings.material.digests,
                tickets,
                refused: None,
            }),
            settings,
            http2,
        })
    }

    /// Whether it is what these settings ask for, whatever is in the files by now.
    pub fn serves(&self, settings: &Settings, http2: bool) -> bool {
        let own = &self.settings;
        own.files == settings.files
            && own.min_version == settings.min_version
            && own.max_handshakes == settings.max_handshakes
            && self.http2 == http2
    }

    /// Reads the files again, and takes them up if they have changed and all of them can be used: `Some` with what they
    /// hold. Otherwise everything stays as it is; an error is returned once for each content. Blocks on the disk.
    pub fn reload(&self, read: Read<'_>) -> Result<Option<Material>, SetupError> {
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
        *loaded = Loaded {
            digests: material.digests,
            tickets,
            refused: None,
        };
        Ok(Some(material))
    }

    fn named(&self, problems: Vec<Problem>) -> Vec<(String, Problem)> {
        let name = |problem: &Problem| self.settings.files.name(problem.place).to_owned();
        problems
            .into_iter()
            .map(|problem| (name(&problem), problem))
            .collect()
    }
}

fn server_config(
    settings: &Settings,
    material: &Material,
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
