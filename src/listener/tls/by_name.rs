//! Which certificate a client is shown: by the name that it asks for (RFC 6066 §3), and by what it can verify.

use std::{collections::HashMap, sync::Arc};

use rustls::{
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};

use super::certificate::Certificate;

/// The certificates of a listener by name: exact names first, then wildcards of one label, then the first of all.
#[derive(Debug)]
pub(super) struct ByName {
    /// In the order of the configuration.
    all: Vec<Arc<CertifiedKey>>,
    /// Indexes into `all`; several where a name has certificates with keys of different kinds.
    by_name: HashMap<String, Vec<usize>>,
}

impl ByName {
    pub(super) fn new(certificates: &[Certificate]) -> Self {
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

    /// The certificates for a name in lower case, the preferred first. Empty where no certificate is for it.
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
        // one that the client cannot verify still ends in a clearer error than none
        in_order()
            .find(verifiable)
            .or_else(|| in_order().next())
            .cloned()
    }
}
