//! A redis-server of the test's own, on a port that was free: killed, stopped, restarted, and killed at the end.

use std::{
    net::{SocketAddr, TcpListener},
    path::Path,
    process::{Child, Command, Stdio},
};

use redis::{Connection, FromRedisValue, Value};
use tempfile::TempDir;

use super::{cli::signal, wait::eventually};

/// A server that runs; killed on drop.
pub struct Redis {
    child: Child,
    folder: TempDir,
    address: SocketAddr,
    options: Vec<String>,
}

impl Redis {
    /// An empty server that keeps nothing on disk.
    pub fn start() -> Redis {
        Redis::with(&[])
    }

    /// The same with more options, such as `["--requirepass", "secret"]`.
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

    /// Runs one command; fails the test where the server refuses it.
    pub fn run<T: FromRedisValue>(&self, command: &[&str]) -> T {
        self.try_run(command)
            .unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    pub fn try_run<T: FromRedisValue>(&self, command: &[&str]) -> redis::RedisResult<T> {
        let mut request = redis::cmd(command[0]);
        request.arg(&command[1..]);
        request.query(&mut self.connect()?)
    }

    fn connect(&self) -> redis::RedisResult<Connection> {
        redis::Client::open(self.url())?.get_connection()
    }

    /// Every key.
    pub fn keys(&self) -> Vec<String> {
        self.run(&["KEYS", "*"])
    }

    /// Commands that were run since the last call, those inside scripts included, but for those of the test itself.
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

    /// Ends it as a power cut does.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts it again, empty, where it was.
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

    /// Stops it where it is: connections stay open, nothing is answered.
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

/// An address on which nobody listens.
pub fn free_address() -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    socket.local_addr().expect("it is bound")
}

fn spawn(folder: &Path, address: SocketAddr, options: &[String]) -> Child {
    let mut command = Command::new("redis-server");
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

/// Waits until the server answers, or has ended.
fn is_up(child: &mut Child, address: SocketAddr) -> bool {
    eventually("a redis-server to answer", || {
        if child.try_wait().expect("a child can be asked").is_some() {
            return Ok(false);
        }
        let client = redis::Client::open(format!("redis://{address}")).expect("a URL");
        match client.get_connection() {
            Ok(_) => Ok(true),
            // it answers, and wants a password
            Err(error) if error.kind() == redis::ErrorKind::AuthenticationFailed => Ok(true),
            Err(error) if error.code() == Some("NOAUTH") => Ok(true),
            Err(error) => Err(error.to_string()),
        }
    })
}
