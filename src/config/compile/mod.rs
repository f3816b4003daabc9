//! Compiles the parsed file into a [`Snapshot`]. Each module turns one table into its settings.
//!
//! A step that finds a problem reports it and continues with a default, so one pass finds every
//! problem. The result is used only if no step reported an error.

mod check_costs;
mod check_routes;
mod check_users;
mod credential;
mod identity;
mod keys_file;
mod limit;
mod listen;
mod names;
mod network;
mod overload;
mod overrides;
mod prices;
mod process;
mod redis;
mod response;
mod route;
mod tls;
mod tokens;
mod upstream;
mod written_route;

pub(super) use upstream::parse_server;

use std::path::Path;

use toml::de::DeTable;

use super::{Snapshot, WrittenConfig, document::Document, keys, read, section::Section};

/// Compiles a parsed file. `None` when nothing can run; the reason was then reported.
pub(super) fn snapshot(
    document: Document<'_>,
    base_dir: &Path,
    tables: &DeTable<'_>,
) -> Option<Snapshot> {
    let file = Section::open(
        document,
        "the file".to_owned(),
        0..0,
        &keys::FILE,
        Some(tables),
    );
    let mut users = identity::compile(&file, base_dir);
    let server = process::server(&file);
    let listeners = listen::compile(&file, base_dir, &users.settings, &server);
    check_users::check_certificates(document, &users, &listeners);
    let admin = process::admin(&file, base_dir, &listeners, &users.settings);
    let upstreams = upstream::compile(&file, base_dir);
    let redis = redis::compile(&file, base_dir);
    let prices = prices::compile(&file);
    let mut limits = limit::compile(&file, &users.settings, &prices, redis.is_some());
    identity::read_claims(&mut users.settings, &limits);
    overrides::compile(&file, users.settings.prefixes(), &mut limits);
    let (response, status_path) = response::compile(&file);
    let routes = route::compile(&file, &upstreams, &limits, status_path.as_deref());
    let overload = overload::compile(&file);
    let log = process::log(&file);
    let trace = process::trace(&file);
    file.finish();
    if document.problems.errors() == 0 {
        check_costs::warn_of_unused_prices(document, &prices, &limits);
    }
    let compiled: Option<Vec<_>> = limits.iter().map(|limit| limit.compiled.as_ref()).collect();
    // after an error, a name that looks missing may only be misspelt
    if let Some(limits) = compiled.filter(|_| document.problems.errors() == 0) {
        check_users::check(document, &users, &limits);
    }
    let (gateway_limits, routes) = routes?;
    let upstreams = upstreams.into_iter().map(|upstream| upstream.settings);
    let limits = limits.into_iter().map(|limit| limit.compiled);
    let written = WrittenConfig {
        files: document.files.seen(),
        ..WrittenConfig::new(tables)
    };
    let hash = read::hash(document.source.text().as_bytes(), &written.files);
    Some(Snapshot {
        server,
        listeners: listeners
            .into_iter()
            .map(|(settings, _)| settings)
            .collect(),
        identity: users.settings,
        upstreams: upstreams.collect::<Option<_>>()?,
        limits: limits.collect::<Option<_>>()?,
        gateway_limits,
        routes,
        response,
        status_path,
        overload,
        redis: redis.flatten(),
        admin: admin?,
        log: log?,
        trace,
        hash,
        written,
    })
}
