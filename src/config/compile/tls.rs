//! `[listen.tls]`: server certificates and keys, and client certificate authentication.

use std::{path::Path, time::SystemTime};

use super::process::to_usize;
use crate::{
    config::{
        code::Code, diagnostic::PendingDiagnostic, expanded_text::ExpandedText, keys, read,
        read_file, section::Section, value::ConfigValue,
    },
    listener::tls::{
        MinVersion, TlsSettings,
        certificate::{
            CertificateFile, CertificateFiles, CertificateMaterial, CertificatePair, ClientAuth,
            FileFault, LabeledFile, Validity,
        },
    },
};

const CERTIFICATES: &str =
    "add certificates = [{ cert = \"certs/api.pem\", key = \"certs/api.key\" }]";

pub(super) fn compile(table: &ConfigValue<'_>, base_dir: &Path) -> Option<TlsSettings> {
    let section = Section::of(table, keys::LISTEN_TLS.title.to_owned(), &keys::LISTEN_TLS)?;
    let min_version = section.choice(
        "min_version",
        &[("1.2", MinVersion::Tls12), ("1.3", MinVersion::Tls13)],
    );
    let max_handshakes = section.integer("max_handshakes");
    let pairs = pairs(&section);
    let client_ca = client_ca(&section);
    section.finish();
    let (pairs, client_ca) = (pairs?, client_ca?);
    let named = |text: &ExpandedText<'_>| LabeledFile {
        path: base_dir.join(&text.value),
        name: text.raw().to_owned(),
    };
    let files = CertificateFiles {
        certificates: pairs
            .iter()
            .map(|(cert, key)| CertificatePair {
                cert: named(cert),
                key: named(key),
            })
            .collect(),
        client_ca: client_ca.as_ref().map(|(text, auth)| (named(text), *auth)),
    };
    let written = |place| match place {
        CertificateFile::Cert(index) => pairs.get(index).map(|(cert, _)| cert),
        CertificateFile::Key(index) => pairs.get(index).map(|(_, key)| key),
        CertificateFile::ClientCa => client_ca.as_ref().map(|(text, _)| text),
    };
    let material = files.load(&read_file).map_err(|problems| {
        for problem in problems {
            if let Some(text) = written(problem.place) {
                text.error(unusable(text, problem.place, &problem.fault));
            }
        }
    });
    let material = material.ok()?;
    let certs = pairs.iter().map(|(cert, _)| cert);
    let authorities = client_ca.iter().map(|(text, _)| text);
    warn_of_expiry(certs.chain(authorities), &material);
    Some(TlsSettings {
        files,
        material,
        min_version: min_version?,
        max_handshakes: to_usize(max_handshakes),
    })
}

/// Reads the certificates and their keys; at least one pair.
fn pairs<'a>(section: &Section<'a>) -> Option<Vec<(ExpandedText<'a>, ExpandedText<'a>)>> {
    let list = section.require("certificates", CERTIFICATES)?;
    let items = list.array()?;
    if items.is_empty() {
        let problem =
            PendingDiagnostic::new(Code::MissingKey, "`certificates` in [listen.tls] is empty");
        list.error(problem.hint(CERTIFICATES));
        return None;
    }
    let pairs: Vec<_> = items.iter().map(pair).collect();
    pairs.into_iter().collect()
}

fn pair<'a>(table: &ConfigValue<'a>) -> Option<(ExpandedText<'a>, ExpandedText<'a>)> {
    let section = Section::of(
        table,
        "an item of `certificates` in [listen.tls]".to_owned(),
        &keys::CERTIFICATE,
    )?;
    let text = |key, hint| section.require(key, hint).and_then(|value| value.text());
    let cert = text("cert", "add cert = \"certs/api.pem\"");
    let key = text("key", "add key = \"certs/api.key\"");
    section.finish();
    Some((cert?, key?))
}

fn client_ca<'a>(section: &Section<'a>) -> Option<Option<(ExpandedText<'a>, ClientAuth)>> {
    let written = section.get("client_auth");
    let client_ca = section.get("client_ca");
    let auth = match &written {
        Some(value) => value.text()?.choice(
            &[
                ("optional", ClientAuth::Optional),
                ("required", ClientAuth::Required),
            ],
            &[],
            "",
        )?,
        None => ClientAuth::default(),
    };
    let Some(client_ca) = client_ca else {
        if let Some(written) = written {
            let message = "`client_auth` has no effect without `client_ca`";
            let hint =
                "add client_ca = \"clients-ca.pem\", the CA of the client certificates to accept";
            written.error(PendingDiagnostic::new(Code::Contradiction, message).hint(hint));
            return None;
        }
        return Some(None);
    };
    Some(Some((client_ca.text()?, auth)))
}

fn unusable(
    text: &ExpandedText<'_>,
    place: CertificateFile,
    fault: &FileFault,
) -> PendingDiagnostic {
    const CERTIFICATE: &str = "a certificate file holds the server's certificate, then its intermediates, each between BEGIN and END CERTIFICATE";
    const CLIENT_CA: &str = "name a file with the certificates of the CAs that sign client certificates, each between BEGIN and END CERTIFICATE";
    const KEY: &str =
        "a key file holds one RSA, ECDSA or Ed25519 key between BEGIN and END PRIVATE KEY";
    let hint = match fault {
        FileFault::Unreadable(_) => read::HINT,
        FileFault::EncryptedKey => {
            "tidegate cannot ask for a passphrase: decrypt the key with openssl pkey -in IN.key -out OUT.key, and let only tidegate read it"
        }
        FileFault::Mismatch => {
            "compare the output of openssl x509 -noout -pubkey -in CERT and openssl pkey -pubout -in KEY"
        }
        _ => match place {
            CertificateFile::Cert(_) => CERTIFICATE,
            CertificateFile::Key(_) => KEY,
            CertificateFile::ClientCa => CLIENT_CA,
        },
    };
    PendingDiagnostic::new(Code::BadFile, format!("{} {fault}", text.shown())).hint(hint)
}

/// Only warns: a gateway with one expired certificate still serves the clients of all others.
fn warn_of_expiry<'a, 't: 'a>(
    files: impl Iterator<Item = &'a ExpandedText<'t>>,
    material: &CertificateMaterial,
) {
    let now = SystemTime::now();
    for text in files {
        let of_this = |validity: &&Validity| validity.name == text.raw();
        let validity = material.validity.iter().find(of_this);
        if let Some(doubt) = validity.and_then(|validity| validity.warning(now)) {
            let message = format!("{} {doubt}", text.shown());
            let problem = PendingDiagnostic::new(Code::CertificateExpires, message);
            let hint = "renew it; tidegate loads the new files without a restart";
            text.warn(problem.hint(hint));
        }
    }
}
