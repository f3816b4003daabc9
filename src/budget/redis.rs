//! The connection to one Redis server, or to the master that Sentinel names, and script calls over
//! it.
//!
//! A call that may have been executed is never repeated, because it may return tokens: the client's
//! own retries and reconnects are off. `NOSCRIPT` means that it was not executed, so the same call
//! is sent once more with its source; after a restart or failover that is normal. The connection is
//! opened in the background and shared by every call; calls without a connection wait for the one
//! attempt in progress. A probe always opens a new connection: a half-open one may look alive for
//! minutes.

use std::{
    borrow::Cow,
    cell::{Cell, RefCell},
    io,
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind,
    IntoConnectionInfo, RedisError, ServerErrorKind, TlsCertificates, Value,
    aio::MultiplexedConnection, io::tcp::TcpSettings,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader},
    net::TcpStream,
    sync::Notify,
    time::Instant,
};

use super::lease::Recollection;

/// A script, and the digest by which a server that has loaded it knows it.
#[derive(Debug)]
pub(super) struct Script {
    source: Cow<'static, str>,
    sha: String,
}

impl Script {
    pub(super) fn new(source: impl Into<Cow<'static, str>>) -> Script {
        let source = source.into();
        let sha = sha1_smol::Sha1::from(source.as_bytes())
            .digest()
            .to_string();
        Script { source, sha }
    }
}

/// The arguments of a script call.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScriptCall<'a> {
    /// Determines the server.
    pub(super) key: &'a str,
    /// A second key; only with a single server.
    pub(super) former_key: Option<&'a str>,
    pub(super) arguments: &'a [Vec<u8>],
    /// The index of the argument that holds the server run of this gateway's memory.
    pub(super) memory_at: Option<usize>,
}

impl<'a> ScriptCall<'a> {
    /// A call on one key.
    pub(super) fn new(key: &'a str, arguments: &'a [Vec<u8>]) -> ScriptCall<'a> {
        ScriptCall {
            key,
            former_key: None,
            arguments,
            memory_at: None,
        }
    }

    fn command(&self, command: &str, script: &str, run: [u8; 4]) -> Cmd {
        let mut call = redis::cmd(command);
        call.arg(script);
        match self.former_key {
            Some(former) => call.arg(2).arg(self.key).arg(former),
            None => call.arg(1).arg(self.key),
        };
        for (index, argument) in self.arguments.iter().enumerate() {
            if self.memory_at == Some(index) {
                let mut memory = argument.clone();
                if let Some(place) = memory.get_mut(Recollection::RUN) {
                    place.copy_from_slice(&run);
                }
                call.arg(memory);
            } else {
                call.arg(argument);
            }
        }
        call
    }
}

/// Why a call failed. The name is the metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Failure {
    /// No connection, or it broke: the call may have been executed.
    Connection,
    /// No reply in twenty timeouts: the call may have been executed.
    Timeout,
    /// User, password or permissions were rejected.
    Auth,
    /// The server is a replica.
    ReadOnly,
    /// The server is loading its data.
    Loading,
    /// The server's memory is full.
    OutOfMemory,
    /// The cluster does not serve this key at the moment.
    Cluster,
    /// The script failed: a bug, or the server is not a Redis.
    Script,
    /// The reply is not in the script's format.
    Malformed,
}

impl Failure {
    pub(super) const ALL: [Failure; 9] = [
        Failure::Connection,
        Failure::Timeout,
        Failure::Auth,
        Failure::ReadOnly,
        Failure::Loading,
        Failure::OutOfMemory,
        Failure::Cluster,
        Failure::Script,
        Failure::Malformed,
    ];

    pub(super) const fn label(self) -> &'static str {
        match self {
            Failure::Connection => "connection",
            Failure::Timeout => "timeout",
            Failure::Auth => "auth",
            Failure::ReadOnly => "readonly",
            Failure::Loading => "loading",
            Failure::OutOfMemory => "oom",
            Failure::Cluster => "cluster",
            Failure::Script => "script",
            Failure::Malformed => "malformed",
        }
    }

    fn of(error: &RedisError) -> Failure {
        match error.kind() {
            _ if error.is_timeout() => Failure::Timeout,
            ErrorKind::Server(ServerErrorKind::ReadOnly) => Failure::ReadOnly,
            ErrorKind::Server(ServerErrorKind::BusyLoading) => Failure::Loading,
            ErrorKind::Server(
                ServerErrorKind::Moved
                | ServerErrorKind::Ask
                | ServerErrorKind::TryAgain
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::MasterDown,
            ) => Failure::Cluster,
            ErrorKind::Server(ServerErrorKind::NoPerm) | ErrorKind::AuthenticationFailed => {
                Failure::Auth
            }
            ErrorKind::Parse | ErrorKind::UnexpectedReturnType => Failure::Malformed,
            ErrorKind::Io => Failure::Connection,
            _ => match error.code() {
                Some("OOM") => Failure::OutOfMemory,
                Some("NOAUTH" | "WRONGPASS") => Failure::Auth,
                Some("MISCONF") => Failure::ReadOnly,
                _ => Failure::Script,
            },
        }
    }

    /// Whether the next call needs a new connection and, where the server is looked up, another
    /// server.
    fn ends_connection(self) -> bool {
        matches!(
            self,
            Failure::Connection | Failure::Timeout | Failure::Malformed | Failure::ReadOnly
        )
    }

    /// Whether the failure concerns the server, and not one key (another program's value may be in
    /// its place).
    pub(super) fn is_of_server(self) -> bool {
        self != Failure::Script
    }
}

/// The address of Redis.
#[derive(Clone, Debug)]
pub enum RedisTarget {
    /// One server.
    One(RedisServer),
    /// The master with this name according to these Sentinels; the credentials for it are in `via`.
    Sentinel {
        /// The master's name at the Sentinels.
        master: String,
        /// Asked in this order.
        nodes: Vec<RedisServer>,
        /// User, password, database and TLS of the master; its address is ignored.
        via: RedisServer,
    },
    /// A cluster; these servers are asked for the others.
    Cluster(Vec<RedisServer>),
}

impl RedisTarget {
    /// Whether any server uses TLS.
    pub fn is_secure(&self) -> bool {
        match self {
            RedisTarget::One(server) | RedisTarget::Sentinel { via: server, .. } => {
                server.is_secure()
            }
            RedisTarget::Cluster(seeds) => seeds.iter().any(RedisServer::is_secure),
        }
    }

    /// Uses these certificates for TLS connections. `Err` says what is wrong with them.
    pub fn with_tls(self, tls: &RedisTls) -> Result<RedisTarget, String> {
        let all = |servers: Vec<RedisServer>| -> Result<Vec<RedisServer>, String> {
            let servers = servers.into_iter();
            servers.map(|server| server.with_tls(tls)).collect()
        };
        Ok(match self {
            RedisTarget::One(server) => RedisTarget::One(server.with_tls(tls)?),
            RedisTarget::Sentinel { master, nodes, via } => RedisTarget::Sentinel {
                master,
                nodes: all(nodes)?,
                via: via.with_tls(tls)?,
            },
            RedisTarget::Cluster(seeds) => RedisTarget::Cluster(all(seeds)?),
        })
    }

    /// The address without credentials.
    pub fn address(&self) -> String {
        let all = |servers: &[RedisServer]| {
            let addresses: Vec<String> = servers.iter().map(RedisServer::address).collect();
            addresses.join(", ")
        };
        match self {
            RedisTarget::One(server) => server.address(),
            RedisTarget::Sentinel { master, nodes, .. } => format!("{master} of {}", all(nodes)),
            RedisTarget::Cluster(seeds) => all(seeds),
        }
    }
}

/// Certificates for TLS connections, in PEM.
#[derive(Debug)]
pub struct RedisTls {
    /// Trusted CAs; `None` is the system's.
    pub ca: Option<Vec<u8>>,
    /// The client certificate and its private key.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

/// A server's address and the credentials for it.
#[derive(Clone, Debug)]
pub struct RedisServer(ConnectionInfo);

/// The redirect target of a cluster; the call was not executed.
#[derive(Debug)]
pub(super) struct Redirect {
    pub(super) address: String,
    /// For this call only.
    pub(super) once: bool,
}

impl RedisServer {
    /// Parses `redis://`, `rediss://` (TLS) or `unix://`, with user, password and database. `Err`
    /// says what is wrong with it.
    pub fn parse(url: &str) -> Result<RedisServer, String> {
        let info = url.into_connection_info();
        let info = info.map_err(|error| error.detail().unwrap_or("not a Redis URL").to_owned())?;
        if let ConnectionAddr::TcpTls { insecure: true, .. } = info.addr() {
            return Err(
                "the URL disables certificate verification, which is required; remove `#insecure`"
                    .to_owned(),
            );
        }
        // small latency-sensitive writes
        let tcp = TcpSettings::default().set_nodelay(true);
        Ok(RedisServer(info.set_tcp_settings(tcp)))
    }

    /// The address without credentials.
    pub fn address(&self) -> String {
        self.0.addr().to_string()
    }

    fn is_secure(&self) -> bool {
        matches!(self.0.addr(), ConnectionAddr::TcpTls { .. })
    }

    fn with_tls(self, tls: &RedisTls) -> Result<RedisServer, String> {
        if !self.is_secure() {
            return Ok(self);
        }
        let identity = tls.identity.clone();
        let certificates = TlsCertificates {
            client_tls: identity.map(|(client_cert, client_key)| ClientTlsConfig {
                client_cert,
                client_key,
            }),
            root_cert: tls.ca.clone(),
        };
        let client = Client::build_with_tls(self.0, certificates);
        let client = client.map_err(|error| error.to_string())?;
        Ok(RedisServer(client.get_connection_info().clone()))
    }

    /// Reads a message that the server sends unasked before it closes. A Redis in protected mode
    /// explains its refusal, but a reset caused by data from this side would discard the text. So
    /// this function sends nothing.
    async fn parting_words(&self, give_up: Instant) -> Option<String> {
        const MAX_BYTES: u64 = 512;
        let ConnectionAddr::Tcp(host, port) = self.0.addr() else {
            return None;
        };
        let heard = tokio::time::timeout_at(give_up, async {
            let stream = TcpStream::connect((host.as_str(), *port)).await?;
            let mut line = Vec::new();
            let mut words = BufReader::new(stream.take(MAX_BYTES));
            words.read_until(b'\n', &mut line).await?;
            io::Result::Ok(line)
        });
        let line = heard.await.ok()?.ok()?;
        let line = String::from_utf8_lossy(line.strip_prefix(b"-")?);
        // the first sentence is the reason; half a page of advice follows
        let sentence = line.split(". ").next()?;
        Some(sentence.trim_end().replace(char::is_control, " "))
    }

    /// The server at `host:port` with the same credentials; an empty host means this server's.
    fn at(&self, address: &str) -> Option<RedisServer> {
        let (host, port) = address.rsplit_once(':')?;
        let port = port.parse().ok()?;
        let or_own = |own: &str| match host {
            "" | "?" => own.to_owned(),
            host => host.to_owned(),
        };
        let address = match self.0.addr() {
            ConnectionAddr::TcpTls {
                host, tls_params, ..
            } => ConnectionAddr::TcpTls {
                host: or_own(host),
                port,
                insecure: false,
                tls_params: tls_params.clone(),
            },
            ConnectionAddr::Tcp(host, _) => ConnectionAddr::Tcp(or_own(host), port),
            _ => ConnectionAddr::Tcp(or_own(""), port),
        };
        Some(RedisServer(self.0.clone().set_addr(address)))
    }
}

/// The parameters of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct RedisTimeouts {
    pub(super) connect: Duration,
    pub(super) response: Duration,
}

/// The connection to one server.
#[derive(Debug)]
pub(super) struct RedisConnection {
    target: RedisTarget,
    timeouts: RedisTimeouts,
    state: RefCell<RedisConnectionState>,
    changed: Notify,
    number: Cell<u64>,
    /// The server run of the last connection; 0 if unknown.
    run: Cell<u32>,
    /// The last error of the server or connection.
    trouble: RefCell<String>,
}

enum RedisConnectionState {
    Down,
    Connecting,
    Up(MultiplexedConnection, u64),
}

impl std::fmt::Debug for RedisConnectionState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            RedisConnectionState::Down => "Down",
            RedisConnectionState::Connecting => "Connecting",
            RedisConnectionState::Up(..) => "Up",
        })
    }
}

/// A reply is accepted for at least this long after its call, so that grants to cancelled requests
/// go back. No longer, because an endless reply consumes memory until then.
const LATEST_REPLY: Duration = Duration::from_secs(4);

/// Most calls queued for writing.
const PIPELINE: usize = 4096;

impl RedisConnection {
    pub(super) fn new(target: RedisTarget, timeouts: RedisTimeouts) -> RedisConnection {
        RedisConnection {
            target,
            timeouts,
            state: RefCell::new(RedisConnectionState::Down),
            changed: Notify::new(),
            number: Cell::new(0),
            run: Cell::new(0),
            trouble: RefCell::default(),
        }
    }

    /// For operators.
    pub(super) fn address(&self) -> String {
        self.target.address()
    }

    /// The server run of the last connection; it changes after a restart, or on another server; 0
    /// if unknown.
    pub(super) fn run(&self) -> u32 {
        self.run.get()
    }

    /// For operators: the last error, in the words of the server or the system.
    pub(super) fn trouble(&self) -> String {
        self.trouble.borrow().clone()
    }

    fn fails(&self, error: &RedisError) -> Failure {
        let failure = Failure::of(error);
        tracing::debug!(%error, kind = failure.label(), redis = self.address(), "a call to Redis failed");
        self.trouble.replace(error.to_string());
        failure
    }

    /// The server at another address, with the same credentials.
    pub(super) fn server_at(&self, address: &str) -> Option<RedisServer> {
        match &self.target {
            RedisTarget::One(server) | RedisTarget::Sentinel { via: server, .. } => {
                server.at(address)
            }
            RedisTarget::Cluster(seeds) => seeds.first()?.at(address),
        }
    }

    /// Runs a script; `asks` means that another server of the cluster redirected this one call
    /// here. If the call is redirected, the failure carries the redirect. After the response
    /// timeout, later calls use another connection; this one stays open for the replies that may
    /// still arrive.
    pub(super) async fn call(
        &self,
        script: &Script,
        call: &ScriptCall<'_>,
        asks: bool,
    ) -> Result<Value, (Failure, Option<Redirect>)> {
        let unconnected = |failure| (failure, None);
        let (mut connection, number) = self.connection().await.map_err(unconnected)?;
        connection.set_response_timeout(self.timeouts.response.max(LATEST_REPLY));
        let run = self.run.get().to_le_bytes();
        let known = call.command("EVALSHA", &script.sha, run);
        let mut result = self.send(&mut connection, number, known, asks).await;
        if let Err(error) = &result
            && error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
        {
            let whole = call.command("EVAL", &script.source, run);
            result = self.send(&mut connection, number, whole, asks).await;
        }
        result.map_err(|error| {
            let failure = self.fails(&error);
            if failure.ends_connection() {
                self.drop_connection(number);
            }
            let redirect = error.redirect_node().map(|(address, _)| Redirect {
                address: address.to_owned(),
                once: error.kind() == ErrorKind::Server(ServerErrorKind::Ask),
            });
            (failure, redirect)
        })
    }

    async fn send(
        &self,
        connection: &mut MultiplexedConnection,
        number: u64,
        command: Cmd,
        asks: bool,
    ) -> Result<Value, RedisError> {
        let sent = send(connection, command, asks);
        tokio::pin!(sent);
        match tokio::time::timeout(self.timeouts.response, &mut sent).await {
            Ok(result) => result,
            Err(_) => {
                self.drop_connection(number);
                sent.await
            }
        }
    }

    /// Runs one command.
    pub(super) async fn query(&self, command: &Cmd) -> Result<Value, Failure> {
        let (mut connection, number) = self.connection().await?;
        let result = connection.send_packed_command(command).await;
        result.and_then(Value::extract_error).map_err(|error| {
            let failure = self.fails(&error);
            if failure.ends_connection() {
                self.drop_connection(number);
            }
            failure
        })
    }

    /// Whether the server runs a writing script over a new connection, which then becomes the one
    /// in use. A server that answers but cannot write (full, or a replica) is useless.
    pub(super) async fn probe(&self, key: &str) -> Result<(), Failure> {
        const WRITE: &str = "return redis.call('SET', KEYS[1], 1, 'PX', 1000)";
        let mut connection = self.open().await?;
        let write = ScriptCall::new(key, &[]).command("EVAL", WRITE, [0; 4]);
        let written = connection.send_packed_command(&write).await;
        match written.and_then(Value::extract_error) {
            Ok(Value::Okay) => {}
            Ok(_) => return Err(Failure::Malformed),
            Err(error) => return Err(self.fails(&error)),
        }
        self.up(connection);
        Ok(())
    }

    async fn connection(&self) -> Result<(MultiplexedConnection, u64), Failure> {
        let waits = match &*self.state.borrow() {
            RedisConnectionState::Up(connection, number) => {
                return Ok((connection.clone(), *number));
            }
            RedisConnectionState::Connecting => true,
            RedisConnectionState::Down => false,
        };
        if waits {
            self.changed.notified().await;
            return match &*self.state.borrow() {
                RedisConnectionState::Up(connection, number) => Ok((connection.clone(), *number)),
                RedisConnectionState::Connecting | RedisConnectionState::Down => {
                    Err(Failure::Connection)
                }
            };
        }
        self.state.replace(RedisConnectionState::Connecting);
        match self.open().await {
            Ok(connection) => Ok((connection.clone(), self.up(connection))),
            Err(failure) => {
                self.state.replace(RedisConnectionState::Down);
                self.changed.notify_waiters();
                Err(failure)
            }
        }
    }

    fn up(&self, connection: MultiplexedConnection) -> u64 {
        let number = self.number.get() + 1;
        self.number.set(number);
        self.state
            .replace(RedisConnectionState::Up(connection, number));
        self.changed.notify_waiters();
        number
    }

    /// Abandons the connection to the calls in flight. It closes with the last of them.
    pub(super) fn give_up(&self) {
        let mut state = self.state.borrow_mut();
        if matches!(&*state, RedisConnectionState::Up(..)) {
            *state = RedisConnectionState::Down;
        }
    }

    fn drop_connection(&self, number: u64) {
        let mut state = self.state.borrow_mut();
        if matches!(&*state, RedisConnectionState::Up(_, current) if *current == number) {
            *state = RedisConnectionState::Down;
        }
    }

    /// Opens a new connection: with Sentinel, to the master that it names now.
    async fn open(&self) -> Result<MultiplexedConnection, Failure> {
        let mut connection = match &self.target {
            RedisTarget::One(server) => self.open_to(server).await?,
            RedisTarget::Sentinel { master, nodes, via } => {
                self.open_to_master(nodes, master, via).await?
            }
            RedisTarget::Cluster(_) => return Err(Failure::Connection),
        };
        self.run.set(run_of(&mut connection).await);
        Ok(connection)
    }

    /// Opens a connection to the master that the first answering Sentinel names.
    async fn open_to_master(
        &self,
        sentinels: &[RedisServer],
        name: &str,
        via: &RedisServer,
    ) -> Result<MultiplexedConnection, Failure> {
        for sentinel in sentinels {
            if let Some(server) = self.master(sentinel, name, via).await {
                return self.open_to(&server).await;
            }
        }
        Err(Failure::Connection)
    }

    /// The master according to one Sentinel.
    async fn master(
        &self,
        sentinel: &RedisServer,
        name: &str,
        via: &RedisServer,
    ) -> Option<RedisServer> {
        let mut connection = self.open_to(sentinel).await.ok()?;
        let mut question = redis::cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(name);
        let answer = connection.send_packed_command(&question).await.ok()?;
        let (host, port): (String, String) = redis::from_redis_value(answer).ok()?;
        via.at(&format!("{host}:{port}"))
    }

    async fn open_to(&self, server: &RedisServer) -> Result<MultiplexedConnection, Failure> {
        let failed = |error: RedisError| match self.fails(&error) {
            failure @ (Failure::Auth | Failure::Loading) => failure,
            _ => Failure::Connection,
        };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeouts.connect))
            .set_response_timeout(Some(self.timeouts.response))
            .set_pipeline_buffer_size(PIPELINE);
        let client = Client::open(server.0.clone()).map_err(failed)?;
        // The follow-up read shares the connect timeout because callers are blocked on it.
        let give_up = Instant::now() + self.timeouts.connect;
        let opening = client.get_multiplexed_async_connection_with_config(&config);
        let error = match opening.await {
            Ok(connection) => return Ok(connection),
            Err(error) => error,
        };
        let was_cut =
            error.kind() == ErrorKind::Io && !error.is_connection_refusal() && !error.is_timeout();
        let failure = failed(error);
        if was_cut && let Some(words) = server.parting_words(give_up).await {
            self.trouble.replace(words);
        }
        Err(failure)
    }
}

/// Identifies a server run: 32 bits of its `run_id`; 0 if it does not or may not report it.
async fn run_of(connection: &mut MultiplexedConnection) -> u32 {
    let mut info = redis::cmd("INFO");
    let answer = connection.send_packed_command(info.arg("server")).await;
    let answer = answer.and_then(Value::extract_error).unwrap_or(Value::Nil);
    let text: String = redis::from_redis_value(answer).unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("run_id:")?.get(..8))
        .and_then(|digits| u32::from_str_radix(digits, 16).ok())
        .unwrap_or(0)
}

/// Sends one command, after `ASKING` for a one-time redirect.
async fn send(
    connection: &mut MultiplexedConnection,
    command: Cmd,
    asks: bool,
) -> Result<Value, RedisError> {
    if !asks {
        let answer = connection.send_packed_command(&command).await;
        return answer.and_then(Value::extract_error);
    }
    let mut both = redis::pipe();
    both.cmd("ASKING").add_command(command);
    let mut answers = connection.send_packed_commands(&both, 0, 2).await?;
    answers.pop().unwrap_or(Value::Nil).extract_error()
}
