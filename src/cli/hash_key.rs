//! `tidegate hash-key`: prints the keys-file entry for an API key. The key is neither shown nor
//! stored.

use std::{
    fmt::Write as _,
    io::{self, BufRead as _, IsTerminal as _, Read as _, Write as _},
    process::{Command, ExitCode, Stdio},
};

use sha2::{Digest, Sha256};

/// Arguments of `tidegate hash-key`.
#[derive(Debug, clap::Args)]
pub struct HashKeyArgs {
    /// The name of the entry, and of the user without --user
    #[arg(value_name = "NAME", default_value = "NAME")]
    name: String,
    /// The user that the key identifies
    #[arg(long)]
    user: Option<String>,
    /// The user's tier
    #[arg(long)]
    tier: Option<String>,
    /// The user's tenant
    #[arg(long)]
    tenant: Option<String>,
}

/// The longest key that a request may carry.
const KEY_MAX_BYTES: u64 = 1024;
/// Shorter keys can be guessed from their digest.
const SHORT_BYTES: usize = 16;

/// Reads a key from standard input, or prompts for it on a terminal, and prints its entry. Exits 1
/// if no request could carry the key.
pub fn hash_key(args: &HashKeyArgs) -> ExitCode {
    let key = match read().and_then(check) {
        Ok(key) => key,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    if key.len() < SHORT_BYTES {
        eprintln!(
            "warning: a key this short can be guessed from its digest; `openssl rand -hex 32` makes a strong one"
        );
    }
    match io::stdout().write_all(entry(args, &key).as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn check(key: String) -> io::Result<String> {
    // HTTP trims field values, so a key with outer white space would never match
    match key.is_empty() || key.trim_ascii() != key || key.chars().any(char::is_control) {
        true => Err(io::Error::other(
            "a key is one line of text without leading or trailing white space",
        )),
        false => Ok(key),
    }
}

fn entry(args: &HashKeyArgs, key: &str) -> String {
    let digest = Sha256::digest(key);
    let mut hex = String::with_capacity(64);
    for byte in digest {
        let _ = write!(hex, "{byte:02x}");
    }
    // a JSON string is also a valid TOML string
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let is_bare = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let name = match !args.name.is_empty() && args.name.chars().all(is_bare) {
        true => args.name.clone(),
        false => quoted(&args.name),
    };
    let mut text = format!("[keys.{name}]\nsha256 = \"{hex}\"\n");
    let given = [
        ("user", &args.user),
        ("tier", &args.tier),
        ("tenant", &args.tenant),
    ];
    for (key, value) in given {
        if let Some(value) = value {
            let _ = writeln!(text, "{key} = {}", quoted(value));
        }
    }
    text
}

fn read() -> io::Result<String> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return ask();
    }
    let mut text = String::new();
    stdin
        .lock()
        .take(KEY_MAX_BYTES + 2)
        .read_to_string(&mut text)?;
    let line = text.strip_suffix('\n').unwrap_or(&text);
    let line = line.strip_suffix('\r').unwrap_or(line);
    if line.len() as u64 > KEY_MAX_BYTES {
        return Err(io::Error::other(format!(
            "a key has at most {KEY_MAX_BYTES} bytes"
        )));
    }
    Ok(line.to_owned())
}

/// Prompts on the terminal with echo off. Ctrl-C becomes a character: as a signal it would end the
/// process with echo still off.
fn ask() -> io::Result<String> {
    let stty = |modes: [&str; 2]| {
        let set = Command::new("stty")
            .args(modes)
            .stdin(Stdio::inherit())
            .status();
        match set {
            Ok(status) if status.success() => Ok(()),
            _ => Err(io::Error::other(
                "this terminal cannot hide the input: pipe the key in instead",
            )),
        }
    };
    stty(["-echo", "-isig"])?;
    eprint!("API key (not shown): ");
    let mut line = String::new();
    let read = io::stdin()
        .lock()
        .take(KEY_MAX_BYTES + 2)
        .read_line(&mut line);
    stty(["echo", "isig"])?;
    eprintln!();
    read?;
    Ok(line.trim_end_matches(['\r', '\n']).to_owned())
}
