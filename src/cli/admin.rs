//! What commands ask of a gateway that runs: its admin listener, in JSON over one short connection.

use std::{
    io::{Read, Write},
    net::{TcpStream, ToSocketAddrs},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde_json::Value;

use super::healthcheck::authority;

/// Which gateway.
#[derive(Clone, Debug, clap::Args)]
pub struct AdminAddress {
    /// The admin address of a gateway that runs: http://HOST:PORT
    #[arg(long, value_name = "URL", env = "TIDEGATE_ADMIN")]
    pub admin: Option<String>,
    /// The file with the token that it asks for
    #[arg(long, value_name = "FILE", env = "TIDEGATE_ADMIN_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
}

/// Where a gateway is asked that is not named.
const DEFAULT: &str = "http://127.0.0.1:9901";
/// Longest wait for each step.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest answer that is read.
const ANSWER_MAX_BYTES: u64 = 16 << 20;

impl AdminAddress {
    /// As it was named, else the default.
    pub fn url(&self) -> &str {
        self.admin.as_deref().unwrap_or(DEFAULT)
    }

    /// What an operation answers; an error says why it does not.
    pub fn ask(&self, method: &str, path: &str, body: &Value) -> anyhow::Result<Value> {
        let url = self.url();
        let authority =
            authority(url).map_err(|wrong| anyhow::anyhow!("--admin {url}: {wrong}"))?;
        let (status, text) = self.exchange(authority, method, path, body).with_context(|| {
            format!(
                "no gateway answers at http://{authority}; is tidegate running, and is this its [admin] address? Give another with --admin http://HOST:PORT"
            )
        })?;
        let json: Value = serde_json::from_str(&text).unwrap_or_default();
        match status {
            200 => Ok(json),
            401 => {
                bail!("http://{authority} asks for a token: give its file with --token-file FILE")
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
        let address = address.context("the name has no address")?;
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
            .context("the answer is not HTTP")?;
        let status = head
            .strip_prefix("HTTP/1.1 ")
            .and_then(|rest| rest.get(..3)?.parse().ok());
        Ok((status.context("the answer is not HTTP")?, body.to_owned()))
    }
}
