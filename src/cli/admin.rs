//! The client of the admin API: one short connection per request, with JSON bodies.

use std::{
    io::{Read, Write},
    net::{TcpStream, ToSocketAddrs},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde_json::Value;

use super::healthcheck::authority;

/// The options that select a running gateway.
#[derive(Clone, Debug, clap::Args)]
pub struct AdminAddress {
    /// The admin address of a running gateway: http://HOST:PORT
    #[arg(long, value_name = "URL", env = "TIDEGATE_ADMIN")]
    pub admin: Option<String>,
    /// The file with the admin token
    #[arg(long, value_name = "FILE", env = "TIDEGATE_ADMIN_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
}

/// The admin address without `--admin`.
const DEFAULT: &str = "http://127.0.0.1:9901";
/// The longest wait for each step.
const PATIENCE: Duration = Duration::from_secs(10);
/// The largest response that is read.
const ANSWER_MAX_BYTES: u64 = 16 << 20;

impl AdminAddress {
    /// The URL from the command line, else the default.
    pub fn url(&self) -> &str {
        self.admin.as_deref().unwrap_or(DEFAULT)
    }

    /// Calls an operation and returns its JSON. The error says what failed and what to try
    /// next.
    pub fn ask(&self, method: &str, path: &str, body: &Value) -> anyhow::Result<Value> {
        let url = self.url();
        let authority =
            authority(url).map_err(|wrong| anyhow::anyhow!("--admin {url}: {wrong}"))?;
        let (status, text) = self.exchange(authority, method, path, body).with_context(|| {
            format!(
                "no gateway answers at http://{authority}: check that tidegate is running, or name its [admin] address with --admin http://HOST:PORT"
            )
        })?;
        let json: Value = serde_json::from_str(&text).unwrap_or_default();
        match status {
            200 => Ok(json),
            401 => {
                bail!("http://{authority} requires a token: name its file with --token-file FILE")
            }
            _ => {
                let why = json["error"].as_str().or(json["detail"].as_str());
                bail!("{}", why.unwrap_or(text.trim()))
            }
        }
    }

    fn exchange(
        &self,
        authority: &str,
        method: &str,
        path: &str,
        body: &Value,
    ) -> anyhow::Result<(u16, String)> {
        let token = match &self.token_file {
            Some(file) => {
                let token = std::fs::read_to_string(file)
                    .with_context(|| format!("cannot read {}", file.display()))?;
                format!("authorization: Bearer {}\r\n", token.trim())
            }
            None => String::new(),
        };
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let address = authority.to_socket_addrs()?.next();
        let address = address.context("the host name has no address")?;
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        write!(
            stream,
            "{method} /api/v1/{path} HTTP/1.1\r\nhost: {authority}\r\n{token}content-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        )?;
        let mut answer = String::new();
        stream.take(ANSWER_MAX_BYTES).read_to_string(&mut answer)?;
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .context("the response is not HTTP")?;
        let status = head
            .strip_prefix("HTTP/1.1 ")
            .and_then(|rest| rest.get(..3)?.parse().ok());
        Ok((status.context("the response is not HTTP")?, body.to_owned()))
    }
}
