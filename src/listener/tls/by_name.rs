//! Selects the certificate for a handshake: by server name (RFC 6066 §3), and by the signature
//! schemes of the client.

use std::{collections::HashMap, sync::Arc};

use rustls::{
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};

use super::certificate::ServerCertificate;

/// The certificates of a listener by name: exact names, then single-label wildcards, then the first
/// certificate.
#[derive(Debug)]
pub(super) struct ByName {
    /// In configuration order.
    all: Vec<Arc<CertifiedKey>>,
    /// Indexes into `all`; several if a name has certificates with different key types.
    by_name: HashMap<String, Vec<usize>>,
}

impl ByName {
    pub(super) fn new(certificates: &[ServerCertificate]) -> Self {
        let mut by_name: HashMap<String, Vec<usize>> = HashMap::new();
        for (index, certificate) in certificates.iter().enumerate() {
            for name in &certificate.names {
                by_name.entry(name.clone()).or_default().push(index);
            }
        }
        Self {
            all: certificates
                .iter()
                .map(|certificate| Arc::clone(&certificate.key))
                .collect(),
            by_name,
        }
    }

    /// Certificates for a lower-case name, preferred first. Empty if none matches.
    fn candidates(&self, name: &str) -> &[usize] {
        let exact = self.by_name.get(name);
        let found = exact.or_else(|| {
            let (_, parent) = name.split_once('.')?;
            self.by_name.get(&format!("*.{parent}"))
        });
        found.map_or(&[], Vec::as_slice)
    }
}

impl ResolvesServerCert for ByName {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let named = hello
            .server_name()
            .map_or(&[][..], |name| self.candidates(name));
        let named = named.iter().map(|&index| &self.all[index]);
        let in_order = || named.clone().chain(&self.all);
        let verifiable =
            |key: &&Arc<CertifiedKey>| key.key.choose_scheme(hello.signature_schemes()).is_some();
        // fall back to any certificate: the client's verification error is clearer than no
        // certificate
        in_order()
            .find(verifiable)
            .or_else(|| in_order().next())
            .cloned()
    }
}
