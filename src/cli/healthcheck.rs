//! `tidegate healthcheck`: asks a running gateway whether it is ready, for containers that have no curl.

use std::{
    io::{self, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    process::ExitCode,
    time::Duration,
};

/// Arguments of `tidegate healthcheck`.
#[derive(Debug, clap::Args)]
pub struct HealthcheckArgs {
    /// The admin address of the gateway.
    #[arg(
        long,
        value_name = "URL",
        env = "TIDEGATE_ADMIN",
        default_value = "http://127.0.0.1:9901"
    )]
    admin: String,
}

/// Longest wait for each step of the check.
const PATIENCE: Duration = Duration::from_secs(2);

/// Exit 0 when `/readyz` answers 200; 1 otherwise, with the reason on stderr.
pub fn healthcheck(args: &HealthcheckArgs) -> ExitCode {
    match ask(&args.admin) {
        Ok(200) => ExitCode::SUCCESS,
        Ok(status) => {
            eprintln!("not ready: {}/readyz answers {status}", args.admin);
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!(
                "not ready: {}: {error}\nIs tidegate running, and is this its [admin] address? Give another with --admin URL.",
                args.admin
            );
            ExitCode::FAILURE
        }
    }
}

/// The status of `GET /readyz`.
fn ask(admin: &str) -> io::Result<u16> {
    let authority = admin
        .strip_prefix("http://")
        .unwrap_or(admin)
        .trim_end_matches('/');
    let address = authority
        .to_socket_addrs()?
        .next()
        .ok_or_else(|| io::Error::other("the name has no address"))?;
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "GET /readyz HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n\r\n"
    )?;
    let mut head = [0; 12];
    stream.read_exact(&mut head)?;
    let status = head
        .strip_prefix(b"HTTP/1.1 ")
        .and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    status.ok_or_else(|| io::Error::other("the answer is not HTTP"))
}
