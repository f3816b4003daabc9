//! The user named in a verified client certificate.
//!
//! The listener verifies the certificate in the handshake; this module takes the name from one of
//! its fields. A repeated field is a fault: the holder may influence the order of its values, and
//! could count as several users.

use super::{fault::CredentialFault, user::User, value::NAME_MAX_BYTES};

/// A client certificate field that can name the user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CertificateField {
    /// The subject's common name.
    #[default]
    CommonName,
    /// The DNS name among the subject's alternative names.
    SanDns,
    /// The URI among the subject's alternative names, such as a SPIFFE ID.
    SanUri,
    /// The SHA-256 digest of the certificate, in hexadecimal.
    Fingerprint,
}

impl CertificateField {
    /// All variants.
    pub const ALL: [CertificateField; 4] = [
        CertificateField::CommonName,
        CertificateField::SanDns,
        CertificateField::SanUri,
        CertificateField::Fingerprint,
    ];

    /// The name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            CertificateField::CommonName => "common_name",
            CertificateField::SanDns => "san_dns",
            CertificateField::SanUri => "san_uri",
            CertificateField::Fingerprint => "fingerprint",
        }
    }
}

/// Names in a verified client certificate: all values of each field, in certificate order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientCertificate {
    /// Subject common names; a value that is not text becomes an empty string.
    pub common_names: Vec<String>,
    /// DNS names, in lower case.
    pub dns_names: Vec<String>,
    /// URIs.
    pub uris: Vec<String>,
    /// SHA-256 of the certificate, 64 hexadecimal digits in lower case.
    pub fingerprint: String,
}

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
