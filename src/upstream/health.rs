//! Active health checks: detect a failed server before a request does.
//!
//! Checks run on the control thread. Each uses a new connection, so that a server that accepts none
//! is detected too. A check passes if the status is 2xx or 3xx. Servers count as healthy until
//! their checks fail, so startup does not wait for them.

use std::{sync::Arc, time::Duration};

use bytes::BytesMut;
use http::{HeaderValue, header::USER_AGENT};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    task::JoinSet,
    time::Instant,
};

use super::{
    Health, HostHeader, SpareHeaderMap, UpstreamError, UpstreamState, endpoint::ServerEndpoint,
    framing, http2, resolve::ServerAddresses,
};

impl UpstreamState {
    /// Resolves server names and checks health; never returns, stops when dropped. Without it, a
    /// server with a name is never reached.
    pub async fn run_health_checks(self: Arc<Self>) {
        let mut tasks = JoinSet::new();
        for server in 0..self.settings().servers.len() {
            let upstream_state = Arc::clone(&self);
            tasks.spawn(async move { upstream_state.keep_resolving(server).await });
            let upstream_state = Arc::clone(&self);
            tasks.spawn(async move { upstream_state.keep_checking(server).await });
        }
        while tasks.join_next().await.is_some() {}
    }

    async fn keep_resolving(&self, server: usize) {
        if let ServerEndpoint::Tcp {
            addresses: ServerAddresses::Named(named),
            ..
        } = self.endpoint(server)
        {
            named.keep_resolving(&self.settings().name).await;
        }
    }

    async fn keep_checking(&self, server: usize) {
        let is_remote = !matches!(self.endpoint(server), ServerEndpoint::Echo);
        let Some(health) = self.settings().health.as_ref().filter(|_| is_remote) else {
            return;
        };
        let question = HealthProbe::new(self, server, health);
        let mut is_healthy = true;
        let mut streak = 0;
        loop {
            let problem = check(self.endpoint(server), &question, health.timeout)
                .await
                .err();
            // counts consecutive checks that contradict the current state
            streak = if problem.is_none() == is_healthy {
                0
            } else {
                streak + 1
            };
            let needed = if is_healthy {
                health.unhealthy_after
            } else {
                health.healthy_after
            };
            if streak >= needed {
                is_healthy = !is_healthy;
                streak = 0;
                self.found(server, problem.as_deref());
            }
            tokio::time::sleep(health.interval).await;
        }
    }
}

/// The request of a check.
enum HealthProbe {
    Http1(Vec<u8>),
    Http2(http::Request<()>),
}

impl HealthProbe {
    fn new(upstream_state: &UpstreamState, server: usize, health: &Health) -> Self {
        if !upstream_state.settings().servers[server].speaks_http2() {
            return Self::Http1(request(upstream_state, server, health));
        }
        let own = upstream_state.settings().servers[server].authority();
        let host = match &upstream_state.settings().host {
            HostHeader::Literal(host) => host.to_str().unwrap_or(&own),
            HostHeader::Preserve | HostHeader::Server => &own,
        };
        let mut request = http::Request::new(());
        // the config compiler has accepted the path and the host
        if let Ok(uri) = format!("http://{host}{}", health.path).parse() {
            *request.uri_mut() = uri;
        }
        *request.version_mut() = http::Version::HTTP_2;
        let agent = concat!("tidegate/", env!("CARGO_PKG_VERSION"));
        let headers = request.headers_mut();
        headers.insert(USER_AGENT, HeaderValue::from_static(agent));
        Self::Http2(request)
    }
}

fn request(upstream_state: &UpstreamState, server: usize, health: &Health) -> Vec<u8> {
    let own = upstream_state.settings().servers[server].authority();
    let host = match &upstream_state.settings().host {
        HostHeader::Literal(host) => host.as_bytes(),
        HostHeader::Preserve | HostHeader::Server => own.as_bytes(),
    };
    let lines: [&[u8]; 5] = [
        b"GET ",
        health.path.as_bytes(),
        b" HTTP/1.1\r\nhost: ",
        host,
        concat!(
            "\r\nuser-agent: tidegate/",
            env!("CARGO_PKG_VERSION"),
            "\r\naccept: */*\r\nconnection: close\r\n\r\n"
        )
        .as_bytes(),
    ];
    lines.concat()
}

/// Runs one check; returns the problem if it fails.
async fn check(
    endpoint: &ServerEndpoint,
    question: &HealthProbe,
    timeout: Duration,
) -> Result<(), String> {
    let give_up = Instant::now() + timeout;
    let status = tokio::time::timeout_at(give_up, ask(endpoint, question, give_up))
        .await
        .map_err(|_| format!("no answer within {timeout:?}"))?
        .map_err(|error| error.to_string())?;
    match status.is_success() || status.is_redirection() {
        true => Ok(()),
        false => Err(format!("it answers {}", status.as_u16())),
    }
}

async fn ask(
    endpoint: &ServerEndpoint,
    question: &HealthProbe,
    give_up: Instant,
) -> Result<http::StatusCode, UpstreamError> {
    let (mut stream, _) = endpoint.connect(give_up).await?;
    let request = match question {
        HealthProbe::Http1(request) => request,
        HealthProbe::Http2(request) => return http2::ask(stream, request.clone()).await,
    };
    let sent = async {
        stream.write_all(request).await?;
        stream.flush().await
    };
    sent.await.map_err(UpstreamError::Closed)?;
    let mut inbox = BytesMut::with_capacity(1024);
    let spare = SpareHeaderMap::default();
    loop {
        // `framing::MAX_HEAD_BYTES` bounds the head, and the timeout bounds the check
        while let Some(head) = framing::take_head(&mut inbox, false, &spare)? {
            if !head.status.is_informational() {
                return Ok(head.status);
            }
        }
        let read = stream
            .read_buf(&mut inbox)
            .await
            .map_err(UpstreamError::Closed)?;
        if read == 0 {
            return Err(UpstreamError::Closed(
                std::io::ErrorKind::UnexpectedEof.into(),
            ));
        }
    }
}
