//! TLS in front of an origin, with the test's own certificate authority.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::oneshot,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        HandshakeKind, ServerConfig, SupportedProtocolVersion, crypto::aws_lc_rs,
        pki_types::PrivatePkcs8KeyDer,
    },
};

use super::Origin;

/// A certificate authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        Authority(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    /// Its own certificate in PEM form.
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// The TLS configuration of a server with this name.
    fn server(&self, name: &str, versions: &[&'static SupportedProtocolVersion]) -> ServerConfig {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        let certificate = params.signed_by(&key, &self.0).expect("a certificate");
        let mut config = ServerConfig::builder_with_provider(aws_lc_rs::default_provider().into())
            .with_protocol_versions(versions)
            .expect("versions that the provider has")
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.into()],
                PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            )
            .expect("the key belongs to the certificate");
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        config
    }
}

/// What clients of the origin did.
#[derive(Default)]
struct Seen {
    handshakes: AtomicUsize,
    resumed: AtomicUsize,
}

/// TLS in front of an origin; stops on drop.
pub struct Secured {
    address: SocketAddr,
    seen: Arc<Seen>,
    _stop: oneshot::Sender<()>,
}

impl Secured {
    /// Accepts these TLS versions, with a certificate for `name`.
    pub fn before(
        origin: &Origin,
        authority: &Authority,
        name: &str,
        versions: &[&'static SupportedProtocolVersion],
    ) -> Secured {
        let acceptor = TlsAcceptor::from(Arc::new(authority.server(name, versions)));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("a bound listener");
        let (stop, stopped) = oneshot::channel();
        let (seen, to) = (Arc::new(Seen::default()), origin.address());
        let counted = Arc::clone(&seen);
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).expect("a listener");
                let accepting = async {
                    loop {
                        let (stream, _) = listener.accept().await.expect("a connection");
                        tokio::spawn(serve(acceptor.clone(), stream, to, Arc::clone(&counted)));
                    }
                };
                tokio::select! {
                    () = accepting => {}
                    _ = stopped => {}
                }
            });
        });
        Secured {
            address,
            seen,
            _stop: stop,
        }
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Number of successful handshakes.
    pub fn handshakes(&self) -> usize {
        self.seen.handshakes.load(Ordering::SeqCst)
    }

    /// Number of handshakes that resumed an earlier session.
    pub fn resumed(&self) -> usize {
        self.seen.resumed.load(Ordering::SeqCst)
    }
}

async fn serve(acceptor: TlsAcceptor, stream: TcpStream, to: SocketAddr, seen: Arc<Seen>) {
    let Ok(mut stream) = acceptor.accept(stream).await else {
        return;
    };
    let connection = stream.get_ref().1;
    assert_eq!(connection.alpn_protocol(), Some(&b"http/1.1"[..]));
    if connection.handshake_kind() == Some(HandshakeKind::Resumed) {
        seen.resumed.fetch_add(1, Ordering::SeqCst);
    }
    seen.handshakes.fetch_add(1, Ordering::SeqCst);
    let mut plain = TcpStream::connect(to).await.expect("the origin");
    // ends with either side
    let _ = tokio::io::copy_bidirectional(&mut stream, &mut plain).await;
}
