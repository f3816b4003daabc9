//! The running counterpart of a configuration: every name resolved, every metric's handle made, every bucket attached.
//!
//! A [`Snapshot`] is pure text made checked; a plan binds it to this process's limiter and metrics once, so that a
//! request follows indexes and touches no map.

use std::{collections::HashMap, sync::Arc};

use metrics::Counter;

use super::{
    exceptions::Exceptions,
    log_once::{LogOnce, UNNAMED_PROXY},
    process::Process,
    rulings::{LimitRulings, Rulings},
    status_limit,
};
use crate::{
    budget::{
        SharedLimit, Sync,
        lease::{self, Terms},
    },
    config::{self, Effect, Mode, Over, Snapshot},
    identity::{
        Client, Credential, Identifier, KeyParts, ManagedFields, Prefixes, Rejected, address::Doubt,
    },
    limit::{self, Algorithm, Attached, Store},
    overload::Priority,
    response::{self, Policy},
    route::RouteTable,
    telemetry::{
        Metrics,
        handles::{DecisionMetrics, IdentityMetrics, LimitMetrics, RouteMetrics},
    },
    upstream::{self, Fleet},
};

/// Why a checked configuration cannot be put to work.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The process has seen more limit names than buckets can tell apart.
    #[error("limit `{0}`: this process has seen too many different limit names; restart it")]
    TooManyLimits(String),
    /// The system has no thread or no entropy to give.
    #[error("cannot start: {0}")]
    System(#[from] std::io::Error),
    /// A limit or a route that the compiler should have refused.
    #[error("{0}")]
    Unfit(String),
}

/// A configuration at work.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) identifier: Identifier,
    /// Some limit tells addresses apart.
    pub(super) counts_addresses: bool,
    pub(super) managed: Arc<ManagedFields>,
    pub(super) prefixes: Prefixes,
    pub(super) table: RouteTable,
    pub(super) routes: Vec<RoutePlan>,
    /// In the order of the configuration, whether a route meets them or not; behind them the page's own.
    pub(super) limits: Vec<Arc<LimitRule>>,
    /// What a request meets that no route takes: the gateway's own limits.
    pub(super) unrouted: RoutePlan,
    /// The page with a caller's own quotas, which meets a limit of its own.
    pub(super) status: RoutePlan,
    status_path: Option<String>,
    pub(super) upstreams: Vec<Arc<Fleet>>,
    pub(super) response: response::Settings,
    /// Limits that are kept together with other gateways, whether a route meets them or not.
    pub(super) shared: Vec<Arc<SharedLimit>>,
    /// By source.
    credentials: Vec<(&'static str, IdentityMetrics)>,
    /// Addresses from trusted proxies that could not be read.
    pub(super) addresses: IdentityMetrics,
}

/// A route at work.
#[derive(Debug)]
pub(super) struct RoutePlan {
    /// Its place in the table; `None` for what no route takes.
    pub(super) index: Option<usize>,
    pub(super) name: String,
    pub(super) upstream: usize,
    pub(super) limits: Vec<LimitPlan>,
    /// The fields of a body that its limits are keyed by.
    pub(super) wanted_fields: Vec<String>,
    pub(super) cost: u64,
    pub(super) max_body_bytes: Option<u64>,
    pub(super) priority: Priority,
    /// Its requests that were shed.
    pub(super) shed: Counter,
    /// It is the page with a caller's own quotas.
    pub(super) shows_quotas: bool,
    pub(super) metrics: Arc<RouteMetrics>,
}

/// A limit as one route meets it.
#[derive(Debug)]
pub(super) struct LimitPlan {
    pub(super) rule: Arc<LimitRule>,
    /// Every request meets it, whatever its route.
    pub(super) everywhere: bool,
    pub(super) decisions: DecisionMetrics,
}

/// A limit at work, shared by the routes that meet it.
#[derive(Debug)]
pub(super) struct LimitRule {
    pub(super) name: String,
    /// Among the limits of the configuration; the page's own comes after them.
    pub(super) place: usize,
    pub(super) key: KeyParts,
    pub(super) buckets: Arc<Attached>,
    /// One for each tier, as clients are told.
    pub(super) policies: Vec<Policy>,
    pub(super) settings: config::Limit,
    pub(super) exceptions: Exceptions,
    /// As in the configuration.
    pub(super) algorithm: &'static str,
    /// Whether what it charges is given back when the request has ended.
    pub(super) holds_slots: bool,
    pub(super) max_delay_ns: u64,
    /// Where other gateways keep it, too.
    pub(super) shared: Option<Arc<SharedLimit>>,
    pub(super) metrics: LimitMetrics,
    /// What operators have decided about it.
    pub(super) rulings: Arc<LimitRulings>,
    /// That one key dominates it.
    pub(super) dominant_key: LogOnce,
}

impl LimitRule {
    /// The quota that applies to this client, by its tier.
    pub(super) fn tier(&self, client: &Client<'_>) -> usize {
        let Some(tier) = client.tier else { return 0 };
        self.settings
            .tiers
            .iter()
            .find(|(name, _)| name == tier)
            .map_or(0, |&(_, index)| index)
    }

    /// Brings the metrics that are read, not pushed, up to date.
    pub(super) fn refresh_metrics(&self) {
        // a gauge is a float: exact up to 2⁵³ keys
        self.metrics.keys.set(self.buckets.keys() as f64);
        self.metrics
            .key_evictions
            .absolute(self.buckets.evictions());
        self.metrics
            .key_overflows
            .absolute(self.buckets.overflowed());
        let is_off = self.rulings.in_force().mode().is_some();
        self.metrics.kill_switch.set(f64::from(u8::from(is_off)));
    }
}

impl Plan {
    /// Binds a configuration to the process's buckets and metrics. Upstreams that are as in the plan before are shared with it,
    /// and limits go on with what was spent ([`Store::change_over`]).
    pub(super) fn bind(
        snapshot: &Snapshot,
        process: &Process,
        previous: Option<&Plan>,
    ) -> Result<Self, PlanError> {
        let (store, metrics, rulings) = (&*process.store, process.metrics(), &process.rulings);
        let region_share = snapshot
            .redis
            .as_ref()
            .map_or(1.0, |redis| redis.region_share);
        let mut quotas = 0;
        let mut rules = Vec::with_capacity(snapshot.limits.len());
        for (place, limit) in snapshot.limits.iter().enumerate() {
            let before = previous.and_then(|plan| plan.limit(&limit.name));
            let mut rule = bind_limit(place, limit, store, metrics, rulings, before)?;
            rule.shared = bind_shared(limit, region_share, quotas, metrics);
            quotas += rule.shared.as_ref().map_or(0, |shared| shared.quotas());
            rules.push(Arc::new(rule));
        }
        // behind the others, so that no index into the configuration finds it
        let own = rules.len();
        let before = previous.and_then(|plan| plan.limit(status_limit::NAME));
        // no operator switches it off with the others: it keeps the gateway from being kept busy
        let ruled = Rulings::default();
        let rule = bind_limit(own, &status_limit::limit(), store, metrics, &ruled, before)?;
        rules.push(Arc::new(rule));
        let counted = Counted::before(previous, metrics);
        let bind_route = |name: &str, limits: &[usize]| RoutePlan {
            index: None,
            name: name.to_owned(),
            upstream: 0,
            wanted_fields: wanted_fields(limits.iter().map(|&limit| &*rules[limit])),
            limits: limits
                .iter()
                .map(|&limit| LimitPlan {
                    rule: Arc::clone(&rules[limit]),
                    everywhere: snapshot.gateway_limits.contains(&limit),
                    decisions: counted.decisions(name, &rules[limit].name),
                })
                .collect(),
            cost: 1,
            max_body_bytes: None,
            priority: Priority::Normal,
            shed: metrics.shed(Priority::Normal.as_str()),
            shows_quotas: false,
            metrics: counted.route(name),
        };
        let routes = snapshot
            .routes
            .iter()
            .enumerate()
            .map(|(index, route)| RoutePlan {
                index: Some(index),
                upstream: route.upstream,
                cost: route.cost,
                max_body_bytes: route.max_body_bytes,
                priority: route.priority,
                shed: metrics.shed(route.priority.as_str()),
                ..bind_route(&route.name, &route.limits)
            });
        let patterns: Vec<_> = snapshot
            .routes
            .iter()
            .map(|route| route.pattern.clone())
            .collect();
        let table = RouteTable::build(&patterns).map_err(|errors| {
            PlanError::Unfit(
                errors
                    .into_iter()
                    .map(|error| error.problem)
                    .collect::<Vec<_>>()
                    .join("; "),
            )
        })?;
        let address_faults = [&Doubt::LABELS[..], &[UNNAMED_PROXY]].concat();
        Ok(Self {
            counts_addresses: rules[..own].iter().any(|rule| rule.key.has_address()),
            identifier: Identifier::new(&snapshot.identity),
            managed: Arc::new(ManagedFields::new(&snapshot.identity)),
            prefixes: snapshot.identity.prefixes(),
            table,
            routes: routes.collect(),
            unrouted: bind_route(NO_ROUTE, &snapshot.gateway_limits),
            status: RoutePlan {
                shows_quotas: true,
                ..bind_route(status_limit::NAME, &[own])
            },
            status_path: snapshot.status_path.clone(),
            upstreams: snapshot
                .upstreams
                .iter()
                .map(|settings| {
                    let mut before = previous.iter().flat_map(|plan| &plan.upstreams);
                    let unchanged = before.find(|fleet| fleet.settings() == settings);
                    let new = || bind_upstream(settings, metrics).map(Arc::new);
                    unchanged.map_or_else(new, |fleet| Ok(Arc::clone(fleet)))
                })
                .collect::<Result<_, _>>()?,
            response: snapshot.response.clone(),
            shared: rules
                .iter()
                .filter_map(|rule| rule.shared.clone())
                .collect(),
            limits: rules,
            credentials: [
                Credential::ApiKey,
                Credential::Token,
                Credential::Header,
                Credential::ClientCert,
            ]
            .map(|kind| (kind.label(), metrics.identity(kind.label(), kind.faults())))
            .into(),
            addresses: metrics.identity("client_ip", &address_faults),
        })
    }

    /// Counts a credential that was not accepted.
    pub(super) fn count_rejected(&self, rejected: &Rejected) {
        if let Some((_, metrics)) = self
            .credentials
            .iter()
            .find(|(source, _)| *source == rejected.source.label())
        {
            metrics.rejected(rejected.kind);
        }
    }

    /// What its limits count with.
    pub(super) fn buckets(&self) -> impl Iterator<Item = &Attached> + Clone {
        self.limits.iter().map(|rule| &*rule.buckets)
    }

    /// The limit of this name.
    pub(super) fn limit(&self, name: &str) -> Option<&Arc<LimitRule>> {
        self.limits.iter().find(|rule| rule.name == name)
    }

    /// Those of the configuration, and our own.
    fn all_routes(&self) -> impl Iterator<Item = &RoutePlan> {
        self.routes.iter().chain([&self.unrouted, &self.status])
    }

    /// Every limit that some request meets, once, as the first route meets it that does.
    pub(super) fn met(&self) -> impl Iterator<Item = &LimitPlan> {
        let mut seen: Vec<usize> = Vec::new();
        self.all_routes()
            .flat_map(|route| &route.limits)
            .filter(move |limit| {
                let new = !seen.contains(&limit.rule.place);
                if new {
                    seen.push(limit.rule.place);
                }
                new
            })
    }

    /// Whether a path, in the form in which it is matched, is that of the page with a caller's own quotas.
    pub(super) fn is_status_page(&self, path: &str) -> bool {
        self.status_path.as_deref() == Some(path)
    }
}

/// The handles of routes: those of the plan before, where it had the route. To make them anew is most of what binding a large
/// configuration would cost.
struct Counted<'a> {
    metrics: &'a Metrics,
    before: HashMap<&'a str, &'a RoutePlan>,
}

impl<'a> Counted<'a> {
    fn before(previous: Option<&'a Plan>, metrics: &'a Metrics) -> Self {
        let previous = previous.filter(|plan| plan.unrouted.metrics.are_of(metrics));
        let routes = previous.into_iter().flat_map(Plan::all_routes);
        Self {
            metrics,
            before: routes.map(|route| (route.name.as_str(), route)).collect(),
        }
    }

    fn route(&self, name: &str) -> Arc<RouteMetrics> {
        let new = || Arc::new(self.metrics.route(name));
        let before = self.before.get(name);
        before.map_or_else(new, |route| Arc::clone(&route.metrics))
    }

    fn decisions(&self, route: &str, limit: &str) -> DecisionMetrics {
        let met = self.before.get(route).map(|route| route.limits.iter());
        let before = met.and_then(|mut met| met.find(|met| met.rule.name == limit));
        let new = || self.metrics.decisions(route, limit);
        before.map_or_else(new, |met| met.decisions.clone())
    }
}

/// The `route` label of what no route takes; not a name that a configuration can give.
const NO_ROUTE: &str = "(none)";

/// As in the configuration.
fn name_of(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::TokenBucket => "token_bucket",
        Algorithm::Gcra => "gcra",
        Algorithm::LeakyBucket => "leaky_bucket",
        Algorithm::FixedWindow => "fixed_window",
        Algorithm::SlidingWindow => "sliding_window",
        Algorithm::SlidingLog => "sliding_log",
        Algorithm::Concurrency => "concurrency",
    }
}

/// The fields of a body that some of these limits are keyed by, each once.
fn wanted_fields<'a>(rules: impl Iterator<Item = &'a LimitRule>) -> Vec<String> {
    let acting = rules.filter(|rule| rule.settings.mode != Mode::Off);
    let mut wanted: Vec<String> = acting
        .flat_map(|rule| rule.key.wanted_body_fields())
        .cloned()
        .collect();
    wanted.sort_unstable();
    wanted.dedup();
    wanted
}

fn bind_upstream(settings: &upstream::Settings, metrics: &Metrics) -> Result<Fleet, PlanError> {
    let servers: Vec<String> = settings.servers.iter().map(ToString::to_string).collect();
    let metrics = metrics.upstream(&settings.name, &servers);
    Fleet::new(settings.clone(), metrics)
        .map_err(|error| PlanError::Unfit(format!("upstream `{}`: {error}", settings.name)))
}

fn bind_limit(
    place: usize,
    limit: &config::Limit,
    store: &Store,
    metrics: &Metrics,
    rulings: &Rulings,
    before: Option<&Arc<LimitRule>>,
) -> Result<LimitRule, PlanError> {
    let unfit =
        |error: limit::QuotaError| PlanError::Unfit(format!("limit `{}`: {error}", limit.name));
    let counted = limit::Limit::new(&limit.name, limit.algorithm, &limit.quotas).map_err(unfit)?;
    let buckets = match before {
        Some(before) => {
            let was = tiers_before(&before.settings, limit);
            store.succeed(&counted, &before.buckets, &was)
        }
        None => store.attach(&counted),
    };
    let buckets = buckets.map_err(|_| PlanError::TooManyLimits(limit.name.clone()))?;
    let policies: Result<Vec<_>, _> = limit
        .quotas
        .iter()
        .map(|quota| match limit.algorithm {
            Algorithm::Concurrency => Policy::of_slots(&limit.name, quota.amount.get()),
            Algorithm::FixedWindow | Algorithm::SlidingLog => Policy::of_window(&limit.name, quota),
            _ => Policy::compile(&limit.name, quota),
        })
        .collect();
    Ok(LimitRule {
        shared: None,
        name: limit.name.clone(),
        place,
        key: KeyParts::new(&limit.name, limit.key.clone()),
        buckets,
        policies: policies
            .map_err(|error| PlanError::Unfit(format!("limit `{}`: {error}", limit.name)))?,
        exceptions: Exceptions::of(limit),
        algorithm: name_of(limit.algorithm),
        holds_slots: limit.algorithm == Algorithm::Concurrency,
        max_delay_ns: match limit.over {
            Over::Reject => 0,
            Over::Delay { max_delay } => u64::try_from(max_delay.as_nanos()).unwrap_or(u64::MAX),
        },
        settings: limit.clone(),
        metrics: metrics.limit(&limit.name),
        rulings: rulings.on(&limit.name),
        dominant_key: LogOnce::default(),
    })
}

/// For each quota of a limit, the one of the same tier, or for the same exception, in the configuration before; else the default.
fn tiers_before(before: &config::Limit, after: &config::Limit) -> Vec<usize> {
    let mut was = vec![0; after.quotas.len()];
    for (name, place) in &after.tiers {
        let same = before.tiers.iter().find(|(other, _)| other == name);
        was[*place] = same.map_or(0, |(_, place)| *place);
    }
    for exception in &after.overrides {
        let same = before
            .overrides
            .iter()
            .find(|other| other.whom == exception.whom);
        if let (Effect::Quota(place), Some(Effect::Quota(then))) =
            (exception.effect, same.map(|same| same.effect))
        {
            was[place] = then;
        }
    }
    was
}

/// The limit as other gateways know it; `before` counts the quotas of those that were bound before.
fn bind_shared(
    limit: &config::Limit,
    region_share: f64,
    before: usize,
    metrics: &Metrics,
) -> Option<Arc<SharedLimit>> {
    let shared = limit.shared?;
    let algorithm = match limit.algorithm {
        Algorithm::TokenBucket | Algorithm::Gcra | Algorithm::LeakyBucket => {
            lease::Algorithm::Bucket
        }
        Algorithm::FixedWindow => lease::Algorithm::Fixed,
        Algorithm::SlidingWindow => lease::Algorithm::Sliding,
        Algorithm::SlidingLog => lease::Algorithm::Log,
        Algorithm::Concurrency => lease::Algorithm::Slots,
    };
    let ahead = shared.sync == Sync::Lease;
    let terms = limit.quotas.iter().map(|quota| {
        let (amount, burst) = (quota.amount.get(), quota.burst.get());
        let terms = match algorithm {
            lease::Algorithm::Slots => Terms::slots(amount, ahead),
            _ => Terms::new(algorithm, amount, quota.period, burst, ahead),
        };
        terms.part(region_share)
    });
    let (slack, metrics) = (
        shared.slack,
        metrics.lease(&limit.name, shared.when_down.as_str()),
    );
    let shared = SharedLimit::new(
        &limit.name,
        terms.collect(),
        shared.when_down,
        before,
        metrics,
    );
    Some(Arc::new(shared.with_slack(slack)))
}
