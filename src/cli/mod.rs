//! The command line: one variant and one file per subcommand.
//!
//! Exit codes: 0 success, 1 findings or failure, 2 wrong usage.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

pub mod admin;
pub mod check;
pub mod config_file;
pub mod explain;
pub mod hash_key;
pub mod healthcheck;
pub mod init;
pub mod run;
pub mod schema;
mod terminal;
mod timed_stream;
pub mod top;

/// A rate-limiting reverse proxy that protects an origin from overload.
#[derive(Debug, Parser)]
#[command(
    name = "tidegate",
    version,
    arg_required_else_help = true,
    after_help = "Start with: tidegate run --to http://localhost:3000 --limit 60/min"
)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start the gateway, from a configuration file or from --to and --limit.
    Run(run::RunArgs),
    /// Check a configuration: print every problem, its location and how to fix it.
    Check(check::CheckArgs),
    /// Explain the decision on a request: its client, its route and each limit. Works offline
    /// or on a running gateway.
    Explain(explain::ExplainArgs),
    /// Show the current load of a running gateway and the keys that it rejects most.
    Top(top::TopArgs),
    /// Write a commented starter configuration.
    Init(init::InitArgs),
    /// Print the JSON Schema of the configuration file, for editors.
    Schema,
    /// Print the keys-file entry for an API key. The key itself is neither shown nor stored.
    HashKey(hash_key::HashKeyArgs),
    /// Exit 0 if a running gateway is ready (for containers without curl).
    Healthcheck(healthcheck::HealthcheckArgs),
}

/// Parses the command line and runs the subcommand.
pub fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Check(args) => check::check(&args),
        Command::Explain(args) => explain::explain(&args),
        Command::Top(args) => top::top(&args),
        Command::Init(args) => init::init(&args),
        Command::Schema => schema::schema(),
        Command::HashKey(args) => hash_key::hash_key(&args),
        Command::Healthcheck(args) => healthcheck::healthcheck(&args),
    }
}
