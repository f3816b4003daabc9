//! What a verified client certificate says of its holder, read once for each connection.

use rustls::pki_types::CertificateDer;
use sha2::{Digest as _, Sha256};
use std::time::SystemTime;
use x509_parser::{certificate::X509Certificate, extensions::GeneralName, prelude::FromDer as _};

use super::certificate::moment;
use crate::identity::Certificate;

/// The certificate's fields; `None` where it is not valid now. It was when it was verified, but a session that is resumed
/// by a ticket may outlive it.
pub(super) fn holder(der: &CertificateDer<'_>, now: SystemTime) -> Option<Certificate> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let validity = certificate.validity();
    if now < moment(validity.not_before) || now > moment(validity.not_after) {
        return None;
    }
    let common_names = certificate.subject().iter_common_name();
    let mut holder = Certificate {
        common_names: common_names
            .map(|name| name.as_str().unwrap_or_default().to_owned())
            .collect(),
        fingerprint: fingerprint(der),
        ..Certificate::default()
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

/// SHA-256 of the whole certificate, as `openssl x509 -fingerprint -sha256` has it, without its colons, in lower case.
fn fingerprint(der: &[u8]) -> String {
    Sha256::digest(der)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
