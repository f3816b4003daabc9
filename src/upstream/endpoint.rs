//! Connects to one server: TCP to one of its addresses, TLS over it, or a Unix socket.
//!
//! Certificates are always verified: against the configured CA only, or else the system's. TLS
//! sessions are resumed; all workers share their cache.

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc};

use rustls::{
    ClientConfig, RootCertStore,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::ServerName,
};
use rustls_platform_verifier::BuilderVerifierExt as _;
use tokio::{
    net::{TcpStream, UnixStream},
    time::Instant,
};
use tokio_rustls::TlsConnector;

use super::{
    Scheme, ServerAddress, UpstreamError, UpstreamSettings, resolve::ServerAddresses,
    stream::ServerStream,
};

/// Why TLS to an upstream cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// Usually: the system has no certificates.
    #[error("cannot load the system's CA certificates: {0}; install them, or set tls_ca")]
    System(rustls::Error),
    /// An invalid CA or name, which the config compiler should have rejected.
    #[error("{0}")]
    Unfit(String),
}

/// One server, as reached by all workers and health checks.
#[derive(Debug)]
pub(super) enum ServerEndpoint {
    Tcp {
        addresses: ServerAddresses,
        tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    },
    Unix(PathBuf),
    /// In this process.
    Echo,
}

impl ServerEndpoint {
    pub(super) fn new(
        server: &ServerAddress,
        tls: Option<&Arc<ClientConfig>>,
        settings: &UpstreamSettings,
    ) -> Result<Self, TlsError> {
        Ok(match server {
            ServerAddress::Http { scheme, host, port } => {
                let name = || match &settings.tls.server_name {
                    Some(name) => Ok(name.clone()),
                    None => ServerName::try_from(host.clone())
                        .map_err(|error| TlsError::Unfit(format!("{host}: {error}"))),
                };
                let tls = match scheme {
                    Scheme::Http | Scheme::H2c => None,
                    Scheme::Https => tls.cloned().map(|tls| Ok((tls, name()?))).transpose()?,
                };
                Self::Tcp {
                    addresses: ServerAddresses::new(host, *port),
                    tls,
                }
            }
            ServerAddress::Unix(path) => Self::Unix(path.clone()),
            ServerAddress::Echo => Self::Echo,
        })
    }

    /// Changes when its addresses do.
    pub(super) fn generation(&self) -> u64 {
        match self {
            Self::Tcp { addresses, .. } => addresses.generation(),
            Self::Unix(_) | Self::Echo => 0,
        }
    }

    /// Whether the server still has this address.
    pub(super) fn has(&self, address: SocketAddr) -> bool {
        match self {
            Self::Tcp { addresses, .. } => addresses.has(address),
            Self::Unix(_) | Self::Echo => true,
        }
    }

    /// Connects before `give_up`; returns the address as well.
    pub(super) async fn connect(
        &self,
        give_up: Instant,
    ) -> Result<(ServerStream, Option<SocketAddr>), UpstreamError> {
        let begun = Instant::now();
        let connected = tokio::time::timeout_at(give_up, self.open(give_up)).await;
        connected.unwrap_or_else(|_| {
            let within = give_up.saturating_duration_since(begun);
            let message = format!("no connection within {within:?}");
            Err(UpstreamError::Connect(io::Error::new(
                io::ErrorKind::TimedOut,
                message,
            )))
        })
    }

    async fn open(
        &self,
        give_up: Instant,
    ) -> Result<(ServerStream, Option<SocketAddr>), UpstreamError> {
        let (addresses, tls) = match self {
            Self::Tcp { addresses, tls } => (addresses, tls),
            Self::Unix(path) => {
                let stream = UnixStream::connect(path)
                    .await
                    .map_err(UpstreamError::Connect)?;
                return Ok((ServerStream::Unix(stream), None));
            }
            Self::Echo => {
                let error = io::Error::other("the built-in server has no connections");
                return Err(UpstreamError::Connect(error));
            }
        };
        let dial = async |address| {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Ok((stream, address))
        };
        let dialled = addresses.connect(give_up, dial).await;
        let (stream, address) = dialled.map_err(UpstreamError::Connect)?;
        let stream = match tls {
            None => ServerStream::Tcp(stream),
            Some((config, name)) => {
                let secured = TlsConnector::from(Arc::clone(config))
                    .connect(name.clone(), stream)
                    .await;
                ServerStream::Tls(Box::new(secured.map_err(UpstreamError::Tls)?))
            }
        };
        Ok((stream, Some(address)))
    }
}

/// TLS configuration shared by the upstream's connections; `None` if no server uses TLS.
pub(super) fn tls_config(
    settings: &UpstreamSettings,
) -> Result<Option<Arc<ClientConfig>>, TlsError> {
    let speaks_tls = |server: &ServerAddress| {
        matches!(
            server,
            ServerAddress::Http {
                scheme: Scheme::Https,
                ..
            }
        )
    };
    if !settings.servers.iter().any(speaks_tls) {
        return Ok(None);
    }
    let provider: Arc<CryptoProvider> = aws_lc_rs::default_provider().into();
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(TlsError::System)?;
    let mut config = match &settings.tls.ca {
        Some(ca) => {
            let mut roots = RootCertStore::empty();
            for certificate in ca {
                let added = roots.add(certificate.clone());
                added.map_err(|error| TlsError::Unfit(error.to_string()))?;
            }
            builder.with_root_certificates(roots)
        }
        None => builder.with_platform_verifier().map_err(TlsError::System)?,
    }
    .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Some(Arc::new(config)))
}
