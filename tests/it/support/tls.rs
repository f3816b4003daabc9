//! The client side of TLS: certificates of the test's own authority, and clients that trust it.

use std::{
    fs, io,
    net::{SocketAddr, TcpStream},
    path::Path,
    sync::Arc,
};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    SanType,
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};

use super::{http::Client, wait::PATIENCE};

/// The certificate authority of one test.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its own certificate.
    pub pem: String,
}

/// A certificate and its key.
#[derive(Clone)]
pub struct Issued {
    pub cert: String,
    pub key: String,
}

impl Authority {
    pub fn new(name: &str) -> Authority {
        let mut params = CertificateParams::new([]).expect("no names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let cert = params.self_signed(&key).expect("a certificate");
        Authority {
            pem: cert.pem(),
            issuer: Issuer::new(params, key),
        }
    }

    /// Issues a certificate for a server with these names.
    pub fn server(&self, names: &[&str]) -> Issued {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("DNS names");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(params)
    }

    /// Issues a certificate for a client with this common name and these URIs.
    pub fn client(&self, name: &str, uris: &[&str]) -> Issued {
        let mut params = CertificateParams::new([]).expect("no names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.subject_alt_names = uris
            .iter()
            .map(|&uri| SanType::URI(uri.try_into().expect("ASCII")))
            .collect();
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Issued {
        let key = KeyPair::generate().expect("a key");
        let cert = params.signed_by(&key, &self.issuer).expect("a certificate");
        Issued {
            cert: cert.pem(),
            key: key.serialize_pem(),
        }
    }
}

impl Issued {
    /// Writes `NAME.pem` and `NAME.key`.
    pub fn write(&self, folder: &Path, name: &str) {
        let put = |kind: &str, text: &str| fs::write(folder.join(format!("{name}.{kind}")), text);
        put("pem", &self.cert).expect("a writable folder");
        put("key", &self.key).expect("a writable folder");
    }
}

/// The TLS settings of a client.
pub struct Hello {
    config: ClientConfig,
    name: String,
}

impl Hello {
    /// Trusts the authority, asks for `name`, and has no client certificate.
    pub fn new(authority: &Authority, name: &str) -> Hello {
        Hello::with_versions(authority, name, rustls::ALL_VERSIONS)
    }

    /// Like [`Hello::new`], with only these TLS versions.
    pub fn with_versions(
        authority: &Authority,
        name: &str,
        versions: &[&'static rustls::SupportedProtocolVersion],
    ) -> Hello {
        Hello::build(authority, name, versions, None)
    }

    /// Like [`Hello::new`], with a client certificate.
    pub fn with_certificate(authority: &Authority, name: &str, own: &Issued) -> Hello {
        Hello::build(authority, name, rustls::ALL_VERSIONS, Some(own))
    }

    fn build(
        authority: &Authority,
        name: &str,
        versions: &[&'static rustls::SupportedProtocolVersion],
        own: Option<&Issued>,
    ) -> Hello {
        let mut roots = RootCertStore::empty();
        let root = CertificateDer::from_pem_slice(authority.pem.as_bytes()).expect("PEM");
        roots.add(root).expect("an authority");
        let provider = Arc::new(aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .expect("versions of this library")
            .with_root_certificates(roots);
        let config = match own {
            None => config.with_no_client_auth(),
            Some(own) => {
                let cert = CertificateDer::from_pem_slice(own.cert.as_bytes()).expect("PEM");
                let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).expect("PEM");
                config
                    .with_client_auth_cert(vec![cert], key)
                    .expect("its own key")
            }
        };
        Hello {
            config,
            name: name.to_owned(),
        }
    }

    /// Offers these protocols (ALPN).
    pub fn offering(mut self, protocols: &[&str]) -> Hello {
        self.config.alpn_protocols = protocols.iter().map(|p| p.as_bytes().to_vec()).collect();
        self
    }

    /// Opens a connection and completes the handshake.
    pub fn connect(&self, address: SocketAddr) -> io::Result<Client<Secure>> {
        let name = ServerName::try_from(self.name.clone()).expect("a DNS name");
        let session =
            ClientConnection::new(Arc::new(self.config.clone()), name).map_err(io::Error::other)?;
        let stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let mut secure = StreamOwned::new(session, stream);
        while secure.conn.is_handshaking() {
            secure.conn.complete_io(&mut secure.sock)?;
        }
        Ok(Client::on(secure))
    }
}

/// A TLS connection after its handshake.
pub type Secure = StreamOwned<ClientConnection, TcpStream>;
