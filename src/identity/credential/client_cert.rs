//! The user named in a verified client certificate.
//!
//! The listener verifies the certificate in the handshake; this module takes the name from one of
//! its fields. A repeated field is a fault: the holder may influence the order of its values, and
//! could count as several users.

use super::{CredentialFault, NAME_MAX_BYTES, User};
use crate::identity::{CertificateField, ClientCertificate};

/// The user that the certificate names; `None` if it lacks the field.
pub(in crate::identity) fn user(
    field: CertificateField,
    certificate: &ClientCertificate,
) -> Result<Option<User<'_>>, CredentialFault> {
    let values = match field {
        CertificateField::CommonName => &certificate.common_names,
        CertificateField::SanDns => &certificate.dns_names,
        CertificateField::SanUri => &certificate.uris,
        CertificateField::Fingerprint => std::slice::from_ref(&certificate.fingerprint),
    };
    let name = match values {
        [] => return Ok(None),
        [name] => name.trim(),
        _ => return Err(CredentialFault::Repeated),
    };
    if name.is_empty() || name.len() > NAME_MAX_BYTES || name.chars().any(char::is_control) {
        return Err(CredentialFault::Malformed);
    }
    Ok(Some(User {
        name,
        tier: None,
        tenant: None,
        token: None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn each_field_names_a_user() {
        let certificate = ClientCertificate {
            common_names: names(&["alice"]),
            dns_names: names(&["alice.example"]),
            uris: names(&["spiffe://example/alice"]),
            fingerprint: "0af1".to_owned(),
        };
        let found = [
            CertificateField::CommonName,
            CertificateField::SanDns,
            CertificateField::SanUri,
            CertificateField::Fingerprint,
        ]
        .map(|field| user(field, &certificate).map(|user| user.map(|user| user.name)));
        let expected = ["alice", "alice.example", "spiffe://example/alice", "0af1"];
        assert_eq!(found, expected.map(|name| Ok(Some(name))));
    }

    #[test]
    fn a_certificate_without_the_field_names_nobody() {
        assert_eq!(
            user(CertificateField::SanUri, &ClientCertificate::default()),
            Ok(None)
        );
    }

    #[test]
    fn ambiguous_or_unreadable_names_are_faults() {
        let long = "a".repeat(NAME_MAX_BYTES + 1);
        for (values, fault) in [
            (names(&["a", "b"]), CredentialFault::Repeated),
            (names(&["a", "a"]), CredentialFault::Repeated),
            (names(&[""]), CredentialFault::Malformed),
            (names(&["a\nb"]), CredentialFault::Malformed),
            (names(&[&long]), CredentialFault::Malformed),
        ] {
            let certificate = ClientCertificate {
                common_names: values,
                ..ClientCertificate::default()
            };
            assert_eq!(
                user(CertificateField::CommonName, &certificate),
                Err(fault),
                "{certificate:?}"
            );
        }
    }
}
