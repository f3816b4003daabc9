//! A redis-server of the test's own, on a free port. Tests can kill, pause and restart it; it ends
//! on drop.

use std::{
    cell::RefCell,
    net::{SocketAddr, TcpListener},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use redis::{Connection, FromRedisValue, Value};
use tempfile::TempDir;

use super::{
    signal::signal,
    wait::{eventually, within},
};

/// Cluster gossip takes about a second, and longer on a busy machine.
const GOSSIP: Duration = Duration::from_secs(40);

/// A running server; killed on drop.
pub struct Redis {
    child: Child,
    folder: TempDir,
    address: SocketAddr,
    options: Vec<String>,
    connection: RefCell<Option<Connection>>,
}

impl Redis {
    /// Starts an empty server without persistence.
    pub fn start() -> Redis {
        Redis::with(&[])
    }

    /// Like [`Redis::start`], with options such as `["--requirepass", "secret"]`.
    pub fn with(options: &[&str]) -> Redis {
        let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
        // another process may take a port between its choice and its use
        for _ in 0..20 {
            let folder = tempfile::Builder::new()
                .prefix("tidegate-redis-")
                .tempdir()
                .expect("a temporary folder");
            let address = free_address();
            let mut child = spawn(folder.path(), address, &options);
            if is_up(&mut child, address) {
                return Redis {
                    child,
                    folder,
                    address,
                    options,
                    connection: RefCell::default(),
                };
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        panic!("no redis-server could be started; is it installed? scripts/test installs it")
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Runs one command. Fails the test if the server rejects it.
    pub fn run<T: FromRedisValue>(&self, command: &[&str]) -> T {
        self.try_run(command)
            .unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    pub fn try_run<T: FromRedisValue>(&self, command: &[&str]) -> redis::RedisResult<T> {
        let mut request = redis::cmd(command[0]);
        request.arg(&command[1..]);
        // reuses one connection for a test's commands; a server closes it when its role changes
        let mut kept = self.connection.borrow_mut();
        if let Some(mut connection) = kept.take() {
            let answer = request.query(&mut connection);
            if !answer.as_ref().is_err_and(redis::RedisError::is_io_error) {
                *kept = Some(connection);
                return answer;
            }
        }
        let mut connection = self.connect()?;
        let answer = request.query(&mut connection);
        *kept = Some(connection);
        answer
    }

    /// The server's node ID in a cluster.
    pub fn node_id(&self) -> String {
        self.run(&["CLUSTER", "MYID"])
    }

    /// The value of an option that the server was started with.
    fn option(&self, name: &str) -> String {
        let at = self.options.iter().position(|option| option == name);
        let value = at.and_then(|at| self.options.get(at + 1));
        value.cloned().unwrap_or_else(|| panic!("it has no {name}"))
    }

    fn connect(&self) -> redis::RedisResult<Connection> {
        redis::Client::open(self.url())?.get_connection()
    }

    /// Every key.
    pub fn keys(&self) -> Vec<String> {
        self.run(&["KEYS", "*"])
    }

    /// Number of commands since the last call. Includes those inside scripts, but not those of the
    /// test itself.
    pub fn commands(&self) -> u64 {
        let text: String = self.run(&["INFO", "commandstats"]);
        let own = ["config", "info", "client", "hello", "ping"];
        let count = |line: &str| {
            let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            let is_own = own.iter().any(|own| name.starts_with(own));
            let calls: u64 = rest.split(',').next()?.parse().ok()?;
            (!is_own).then_some(calls)
        };
        let calls = text.lines().filter_map(count).sum();
        self.run::<Value>(&["CONFIG", "RESETSTAT"]);
        calls
    }

    /// Kills the server without warning, like a power cut.
    pub fn kill(&mut self) {
        self.connection.take();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Restarts the server, empty, on the same port.
    pub fn restart(&mut self) {
        self.kill();
        eventually("the redis-server to start again", || {
            self.child = spawn(self.folder.path(), self.address, &self.options);
            if is_up(&mut self.child, self.address) {
                Ok(())
            } else {
                Err("it ended".to_owned())
            }
        });
    }

    /// Suspends the process: connections stay open, but nothing is answered.
    pub fn pause(&self) {
        signal(self.child.id(), "STOP");
    }

    pub fn resume(&self) {
        signal(self.child.id(), "CONT");
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A master, its replica, and a Sentinel that monitors them.
pub struct Sentinel {
    pub master: Redis,
    pub replica: Redis,
    pub address: SocketAddr,
    child: Child,
    _folder: TempDir,
}

impl Sentinel {
    /// Starts them and waits until the Sentinel knows the replica.
    pub fn start() -> Sentinel {
        let master = Redis::start();
        let replica = Redis::with(&["--replicaof", "127.0.0.1", &master.port().to_string()]);
        let folder = tempfile::Builder::new()
            .prefix("tidegate-sentinel-")
            .tempdir()
            .expect("a temporary folder");
        let address = free_address();
        let config = folder.path().join("sentinel.conf");
        let text = format!(
            "port {}\nbind 127.0.0.1\ndir {}\nsentinel monitor mymaster 127.0.0.1 {} 1\n\
             sentinel down-after-milliseconds mymaster 500\nsentinel failover-timeout mymaster 2000\n",
            address.port(),
            folder.path().display(),
            master.port()
        );
        std::fs::write(&config, text).expect("a temporary folder is writable");
        let child = Command::new(program())
            .arg(&config)
            .arg("--sentinel")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is installed (scripts/test does it)");
        let sentinel = Sentinel {
            master,
            replica,
            address,
            child,
            _folder: folder,
        };
        within(GOSSIP, "the Sentinel to know the replica", || {
            let replicas: Vec<Value> = ask_sentinel(address, &["REPLICAS", "mymaster"])?;
            let link: String = sentinel.replica.run(&["INFO", "replication"]);
            if replicas.len() == 1 && link.contains("master_link_status:up") {
                Ok(())
            } else {
                Err(link)
            }
        });
        sentinel
    }
}

/// A Sentinel's response, or the reason for its failure.
pub fn ask_sentinel<T: FromRedisValue>(address: SocketAddr, words: &[&str]) -> Result<T, String> {
    let client = redis::Client::open(format!("redis://{address}")).expect("a URL");
    let ask = |mut connection| redis::cmd("SENTINEL").arg(words).query(&mut connection);
    client
        .get_connection()
        .and_then(ask)
        .map_err(|error| error.to_string())
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A cluster of three masters, with replicas for the first ones.
pub struct Cluster {
    pub masters: Vec<Redis>,
    pub replicas: Vec<Redis>,
}

impl Cluster {
    /// Starts the cluster and waits until every server reports it as complete.
    pub fn start(replicas: usize) -> Cluster {
        let node = || {
            let bus = free_address().port().to_string();
            Redis::with(&[
                "--cluster-enabled",
                "yes",
                "--cluster-node-timeout",
                "2000",
                // a lost master affects only its own keys
                "--cluster-require-full-coverage",
                "no",
                "--cluster-port",
                &bus,
            ])
        };
        let cluster = Cluster {
            masters: (0..3).map(|_| node()).collect(),
            replicas: (0..replicas).map(|_| node()).collect(),
        };
        let nodes = || cluster.masters.iter().chain(&cluster.replicas);
        for (master, range) in
            cluster
                .masters
                .iter()
                .zip([("0", "5460"), ("5461", "10922"), ("10923", "16383")])
        {
            master.run::<Value>(&["CLUSTER", "ADDSLOTSRANGE", range.0, range.1]);
        }
        for (index, node) in nodes().enumerate() {
            node.run::<Value>(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]);
        }
        for node in nodes().skip(1) {
            let (port, bus) = (node.port().to_string(), node.option("--cluster-port"));
            cluster.masters[0].run::<Value>(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
        }
        let count = nodes().count();
        let is_whole = |what: &str| {
            for node in nodes() {
                within(GOSSIP, what, || {
                    let info: String = node.run(&["CLUSTER", "INFO"]);
                    let knows_all = info.contains(&format!("cluster_known_nodes:{count}"));
                    // without full coverage, a server that does not know all slots yet also reports
                    // `ok`
                    let has_all = info.contains("cluster_slots_ok:16384");
                    if knows_all && has_all && info.contains("cluster_state:ok") {
                        Ok(())
                    } else {
                        Err(info)
                    }
                });
            }
        };
        is_whole("the cluster to be whole");
        for (replica, master) in cluster.replicas.iter().zip(&cluster.masters) {
            replica.run::<Value>(&["CLUSTER", "REPLICATE", &master.node_id()]);
            within(GOSSIP, "the replica to follow its master", || {
                let info: String = replica.run(&["INFO", "replication"]);
                if info.contains("master_link_status:up") {
                    Ok(())
                } else {
                    Err(info)
                }
            });
            within(GOSSIP, "everybody to know the replica", || {
                for node in nodes() {
                    let nodes: String = node.run(&["CLUSTER", "NODES"]);
                    if !nodes.contains("slave") {
                        return Err(nodes);
                    }
                }
                Ok(())
            });
        }
        cluster
    }

    /// The server that clients contact first.
    pub fn seed(&self) -> String {
        self.masters[1].url()
    }

    /// Starts the migration of slots. Until it is finished, both masters redirect clients.
    pub fn begin_to_move(&self, slots: std::ops::Range<u16>, from: usize, to: usize) {
        let (from, to) = (&self.masters[from], &self.masters[to]);
        let (from_id, to_id) = (from.node_id(), to.node_id());
        for slot in slots {
            let slot = slot.to_string();
            to.run::<Value>(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]);
            from.run::<Value>(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]);
        }
    }

    /// Migrates the keys and announces the new owner of the slots to both masters.
    pub fn finish_to_move(&self, slots: std::ops::Range<u16>, from: usize, to: usize) {
        let (from, to) = (&self.masters[from], &self.masters[to]);
        let (to_id, to_port) = (to.node_id(), to.port().to_string());
        for slot in slots {
            let slot = slot.to_string();
            let keys: Vec<String> = from.run(&["CLUSTER", "GETKEYSINSLOT", &slot, "1000"]);
            for key in keys {
                from.run::<Value>(&["MIGRATE", "127.0.0.1", &to_port, &key, "0", "1000"]);
            }
            for node in [to, from] {
                node.run::<Value>(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]);
            }
        }
    }
}

/// The server program. TIDEGATE_TEST_REDIS can name another one with the same protocol.
fn program() -> String {
    std::env::var("TIDEGATE_TEST_REDIS").unwrap_or_else(|_| "redis-server".to_owned())
}

/// An address without a listener.
pub fn free_address() -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    socket.local_addr().expect("it is bound")
}

fn spawn(folder: &Path, address: SocketAddr, options: &[String]) -> Child {
    let mut command = Command::new(program());
    command
        .current_dir(folder)
        .args(["--port", &address.port().to_string()])
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .args(["--daemonize", "no"])
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
        .spawn()
        .expect("redis-server is installed (scripts/test does it)")
}

/// Waits until the server answers or has ended. Returns whether it is up.
fn is_up(child: &mut Child, address: SocketAddr) -> bool {
    eventually("a redis-server to answer", || {
        if child.try_wait().expect("a child can be asked").is_some() {
            return Ok(false);
        }
        let client = redis::Client::open(format!("redis://{address}")).expect("a URL");
        let pid = format!("process_id:{}\r\n", child.id());
        let told = client.get_connection().and_then(|mut connection| {
            redis::cmd("INFO")
                .arg("server")
                .query::<String>(&mut connection)
        });
        match told {
            // another test's server may have taken the port
            Ok(told) => Ok(told.contains(&pid)),
            // it is up and requires a password
            Err(error) if error.kind() == redis::ErrorKind::AuthenticationFailed => Ok(true),
            Err(error) if error.code() == Some("NOAUTH") => Ok(true),
            Err(error) => Err(error.to_string()),
        }
    })
}
