//! The running form of a configuration: names resolved, metric handles created, buckets attached.
//!
//! A [`Snapshot`] is checked text. A plan binds it once to the limiter and metrics of this process,
//! so that a request follows indices and looks up no map.

use std::{collections::HashMap, sync::Arc};

use metrics::Counter;

use super::{
    config_exceptions::ConfigExceptions,
    cost_rule::{CostNeeds, CostPlan},
    cost_terms,
    log_once::{LogOnce, UNNAMED_PROXY},
    process::Process,
    runtime_overrides::{LimitOverrides, RuntimeOverrides},
    status_limit,
};
use crate::{
    budget::{SharedLimit, Sync, lease::LeaseTerms},
    config::{self, Effect, Mode, Over, Snapshot},
    identity::{
        Client, Credential, Identifier, KeyParts, ManagedFields, Prefixes, Rejected,
        address::AddressFault,
    },
    limit::{self, Attached, Refill, SharedMethod, Store},
    overload::Priority,
    response::{self, Policy},
    route::RouteTable,
    telemetry::{
        Metrics,
        handles::{DecisionMetrics, IdentityMetrics, LimitMetrics, RouteMetrics},
    },
    upstream::{self, UpstreamState},
};

/// Why a checked configuration cannot run.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The process has seen more limit names than bucket ids can distinguish.
    #[error("limit `{0}`: this process has run too many different limit names; restart it")]
    TooManyLimits(String),
    /// The system cannot start a thread or provide entropy.
    #[error("cannot start: {0}")]
    System(#[from] std::io::Error),
    /// A limit or a route that the config compiler should have rejected.
    #[error("{0}")]
    Unfit(String),
}

/// A running configuration.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) identifier: Identifier,
    /// True if some limit is keyed by address.
    pub(super) counts_addresses: bool,
    pub(super) managed: Arc<ManagedFields>,
    pub(super) prefixes: Prefixes,
    pub(super) table: RouteTable,
    pub(super) routes: Vec<RoutePlan>,
    /// In configuration order, used by a route or not. The status page's limit comes last.
    pub(super) limits: Vec<Arc<LimitRule>>,
    /// Placeholder for requests without a route. Global limits apply to it.
    pub(super) unrouted: RoutePlan,
    /// The status page with a caller's own quotas. Only its built-in limit applies.
    pub(super) status: RoutePlan,
    status_path: Option<String>,
    pub(super) upstreams: Vec<Arc<UpstreamState>>,
    pub(super) response: response::ResponseSettings,
    /// Limits shared with other gateways, used by a route or not.
    pub(super) shared: Vec<Arc<SharedLimit>>,
    /// By credential source.
    credentials: Vec<(&'static str, IdentityMetrics)>,
    /// Counts malformed addresses from trusted proxies.
    pub(super) addresses: IdentityMetrics,
}

/// A running route.
#[derive(Debug)]
pub(super) struct RoutePlan {
    /// Index in the route table; `None` for built-in routes.
    pub(super) index: Option<usize>,
    pub(super) name: String,
    pub(super) upstream: usize,
    pub(super) limits: Vec<LimitPlan>,
    /// The body fields that key its limits.
    pub(super) wanted_fields: Vec<String>,
    pub(super) cost: u64,
    /// What its limits on costs need.
    pub(super) costs: CostNeeds,
    pub(super) max_body_bytes: Option<u64>,
    pub(super) priority: Priority,
    /// Counts its shed requests.
    pub(super) shed: Counter,
    /// True for the status page.
    pub(super) shows_quotas: bool,
    pub(super) metrics: Arc<RouteMetrics>,
}

/// A limit on one route.
#[derive(Debug)]
pub(super) struct LimitPlan {
    pub(super) rule: Arc<LimitRule>,
    /// The limit applies to every request, on any route.
    pub(super) everywhere: bool,
    pub(super) decisions: DecisionMetrics,
}

/// A running limit, shared by its routes.
#[derive(Debug)]
pub(super) struct LimitRule {
    pub(super) name: String,
    /// Index in the configuration. The status page's limit comes last.
    pub(super) place: usize,
    pub(super) key: KeyParts,
    pub(super) buckets: Arc<Attached>,
    /// One per tier, as reported to clients.
    pub(super) policies: Vec<Policy>,
    pub(super) settings: config::LimitSettings,
    pub(super) exceptions: ConfigExceptions,
    /// The algorithm's configuration name.
    pub(super) algorithm: &'static str,
    /// Whether the charge is released when the request ends.
    pub(super) holds_slots: bool,
    pub(super) max_delay_ns: u64,
    /// Set if the limit charges costs.
    pub(super) cost: Option<Arc<CostPlan>>,
    /// Set if other gateways share the limit.
    pub(super) shared: Option<Arc<SharedLimit>>,
    pub(super) metrics: LimitMetrics,
    /// The runtime overrides of this limit.
    pub(super) runtime_overrides: Arc<LimitOverrides>,
    /// Logs a dominant key once.
    pub(super) dominant_key: LogOnce,
}

impl LimitRule {
    /// Whether the body of a request is read before this limit can decide.
    pub(super) fn needs_body(&self) -> bool {
        let reads = |cost: &Arc<CostPlan>| {
            let source = &cost.settings.source;
            cost.settings.reads_request || matches!(source, config::CostSource::RequestJson(_))
        };
        !self.key.wanted_body_fields().is_empty() || self.cost.as_ref().is_some_and(reads)
    }

    /// Index of the quota for the client's tier.
    pub(super) fn tier(&self, client: &Client<'_>) -> usize {
        let Some(tier) = client.tier else { return 0 };
        self.settings
            .tiers
            .iter()
            .find(|(name, _)| name == tier)
            .map_or(0, |&(_, index)| index)
    }

    /// Updates the metrics that are polled, not pushed.
    pub(super) fn refresh_metrics(&self) {
        // A gauge is a float: exact up to 2⁵³ keys.
        self.metrics.keys.set(self.buckets.keys() as f64);
        self.metrics
            .key_evictions
            .absolute(self.buckets.evictions());
        self.metrics
            .key_overflows
            .absolute(self.buckets.overflowed());
        let is_off = self.runtime_overrides.in_force().mode().is_some();
        self.metrics.kill_switch.set(f64::from(u8::from(is_off)));
    }
}

impl Plan {
    /// Binds a configuration to the process's buckets and metrics. Unchanged upstreams are shared
    /// with the previous plan. Limits keep their usage ([`Store::change_over`]).
    pub(super) fn bind(
        snapshot: &Snapshot,
        process: &Process,
        previous: Option<&Plan>,
    ) -> Result<Self, PlanError> {
        let metrics = process.metrics();
        let rules = bind_rules(snapshot, process, previous)?;
        // The built-in limit is the last one.
        let status = rules.len() - 1;
        let counted = MetricHandles::before(previous, metrics);
        let binder = RouteBinder {
            snapshot,
            rules: &rules,
            counted,
        };
        let address_faults = [&AddressFault::LABELS[..], &[UNNAMED_PROXY]].concat();
        Ok(Self {
            counts_addresses: rules[..status].iter().any(|rule| rule.key.has_address()),
            identifier: Identifier::new(&snapshot.identity),
            managed: Arc::new(ManagedFields::new(&snapshot.identity)),
            prefixes: snapshot.identity.prefixes(),
            table: route_table(snapshot)?,
            routes: binder.configured(),
            unrouted: binder.built_in(NO_ROUTE, &snapshot.gateway_limits),
            status: RoutePlan {
                shows_quotas: true,
                ..binder.built_in(status_limit::NAME, &[status])
            },
            status_path: snapshot.status_path.clone(),
            upstreams: bind_upstreams(snapshot, metrics, previous)?,
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

    /// Counts a rejected credential.
    pub(super) fn count_rejected(&self, rejected: &Rejected) {
        if let Some((_, metrics)) = self
            .credentials
            .iter()
            .find(|(source, _)| *source == rejected.source.label())
        {
            metrics.rejected(rejected.kind);
        }
    }

    /// The buckets of all limits.
    pub(super) fn buckets(&self) -> impl Iterator<Item = &Attached> + Clone {
        self.limits.iter().map(|rule| &*rule.buckets)
    }

    /// The limit of this name.
    pub(super) fn limit(&self, name: &str) -> Option<&Arc<LimitRule>> {
        self.limits.iter().find(|rule| rule.name == name)
    }

    /// The configured and the built-in routes.
    fn all_routes(&self) -> impl Iterator<Item = &RoutePlan> {
        self.routes.iter().chain([&self.unrouted, &self.status])
    }

    /// Every limit used by a route, once, as its first route has it.
    pub(super) fn limits_in_use(&self) -> impl Iterator<Item = &LimitPlan> {
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

    /// Whether a normalised path is the status page.
    pub(super) fn is_status_page(&self, path: &str) -> bool {
        self.status_path.as_deref() == Some(path)
    }
}

/// Metric handles of routes, reused from the previous plan. Creating them would dominate the cost
/// of binding a large configuration.
struct MetricHandles<'a> {
    metrics: &'a Metrics,
    before: HashMap<&'a str, &'a RoutePlan>,
}

impl<'a> MetricHandles<'a> {
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

/// The `route` label of requests without a route. Configurations cannot use this name.
const NO_ROUTE: &str = "(none)";

/// The body fields that key these limits, without duplicates.
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

/// The limits in configuration order, and the status page's limit behind them.
fn bind_rules(
    snapshot: &Snapshot,
    process: &Process,
    previous: Option<&Plan>,
) -> Result<Vec<Arc<LimitRule>>, PlanError> {
    let (store, metrics) = (&*process.store, process.metrics());
    let region_share = snapshot
        .redis
        .as_ref()
        .map_or(1.0, |redis| redis.region_share);
    let mut quotas = 0;
    let mut rules = Vec::with_capacity(snapshot.limits.len() + 1);
    for (place, limit) in snapshot.limits.iter().enumerate() {
        let before = previous.and_then(|plan| plan.limit(&limit.name));
        let overrides = &process.runtime_overrides;
        let mut rule = bind_limit(place, limit, store, metrics, overrides, before)?;
        rule.shared = bind_shared(limit, region_share, quotas, metrics);
        quotas += rule.shared.as_ref().map_or(0, |shared| shared.quotas());
        rules.push(Arc::new(rule));
    }
    // Append last so that configuration indices never address the built-in limit.
    let (place, limit) = (rules.len(), status_limit::limit());
    let before = previous.and_then(|plan| plan.limit(status_limit::NAME));
    // No runtime override applies: switching off all limits must not unprotect the status page.
    let no_overrides = RuntimeOverrides::default();
    let rule = bind_limit(place, &limit, store, metrics, &no_overrides, before)?;
    rules.push(Arc::new(rule));
    Ok(rules)
}

/// Binds routes to their limits and metrics.
struct RouteBinder<'a> {
    snapshot: &'a Snapshot,
    rules: &'a [Arc<LimitRule>],
    counted: MetricHandles<'a>,
}

impl RouteBinder<'_> {
    /// The routes in configuration order.
    fn configured(&self) -> Vec<RoutePlan> {
        let bind = |(index, route): (usize, &config::RouteSettings)| RoutePlan {
            index: Some(index),
            upstream: route.upstream,
            cost: route.cost,
            max_body_bytes: route.max_body_bytes,
            priority: route.priority,
            shed: self.counted.metrics.shed(route.priority.as_str()),
            ..self.built_in(&route.name, &route.limits)
        };
        self.snapshot.routes.iter().enumerate().map(bind).collect()
    }

    /// A route without settings of its own.
    fn built_in(&self, name: &str, limits: &[usize]) -> RoutePlan {
        let rules = limits.iter().map(|&limit| &self.rules[limit]);
        let plan = |(rule, limit): (&Arc<LimitRule>, &usize)| LimitPlan {
            rule: Arc::clone(rule),
            everywhere: self.snapshot.gateway_limits.contains(limit),
            decisions: self.counted.decisions(name, &rule.name),
        };
        RoutePlan {
            index: None,
            name: name.to_owned(),
            upstream: 0,
            wanted_fields: wanted_fields(rules.clone().map(|rule| &**rule)),
            limits: rules.clone().zip(limits).map(plan).collect(),
            cost: 1,
            costs: cost_needs(rules.clone().map(|rule| &**rule)),
            max_body_bytes: None,
            priority: Priority::Normal,
            shed: self.counted.metrics.shed(Priority::Normal.as_str()),
            shows_quotas: false,
            metrics: self.counted.route(name),
        }
    }
}

fn route_table(snapshot: &Snapshot) -> Result<RouteTable, PlanError> {
    let routes = snapshot.routes.iter();
    let patterns: Vec<_> = routes.map(|route| route.pattern.clone()).collect();
    RouteTable::build(&patterns).map_err(|errors| {
        let problems = errors.into_iter().map(|error| error.problem);
        PlanError::Unfit(problems.collect::<Vec<_>>().join("; "))
    })
}

/// The upstreams; unchanged ones are shared with the previous plan.
fn bind_upstreams(
    snapshot: &Snapshot,
    metrics: &Metrics,
    previous: Option<&Plan>,
) -> Result<Vec<Arc<UpstreamState>>, PlanError> {
    let bind = |settings: &upstream::UpstreamSettings| {
        let mut before = previous.iter().flat_map(|plan| &plan.upstreams);
        match before.find(|upstream_state| upstream_state.settings() == settings) {
            Some(unchanged) => Ok(Arc::clone(unchanged)),
            None => bind_upstream(settings, metrics).map(Arc::new),
        }
    };
    snapshot.upstreams.iter().map(bind).collect()
}

/// What the limits on costs among these need.
fn cost_needs<'a>(rules: impl Iterator<Item = &'a LimitRule>) -> CostNeeds {
    let acting = rules.filter(|rule| rule.settings.mode != Mode::Off);
    CostNeeds::of(acting.filter_map(|rule| Some(&*rule.cost.as_ref()?.settings)))
}

fn bind_upstream(
    settings: &upstream::UpstreamSettings,
    metrics: &Metrics,
) -> Result<UpstreamState, PlanError> {
    let servers: Vec<String> = settings.servers.iter().map(ToString::to_string).collect();
    let metrics = metrics.upstream(&settings.name, &servers);
    UpstreamState::new(settings.clone(), metrics)
        .map_err(|error| PlanError::Unfit(format!("upstream `{}`: {error}", settings.name)))
}

fn bind_limit(
    place: usize,
    limit: &config::LimitSettings,
    store: &Store,
    metrics: &Metrics,
    runtime_overrides: &RuntimeOverrides,
    before: Option<&Arc<LimitRule>>,
) -> Result<LimitRule, PlanError> {
    let unfit =
        |error: limit::QuotaError| PlanError::Unfit(format!("limit `{}`: {error}", limit.name));
    let counted = limit.rule().map_err(unfit)?;
    let buckets = match before {
        Some(before) => {
            let was = tiers_before(&before.settings, limit);
            store.attach_after(&counted, &before.buckets, &was)
        }
        None => store.attach(&counted),
    };
    let buckets = buckets.map_err(|_| PlanError::TooManyLimits(limit.name.clone()))?;
    let algorithm = limit.algorithm.record();
    let policies: Result<Vec<_>, _> = limit
        .quotas
        .iter()
        .map(|quota| match algorithm.refill {
            Refill::OnRelease => Policy::of_slots(&limit.name, quota.amount.get()),
            Refill::AtOnce => Policy::of_window(&limit.name, quota),
            Refill::Gradual => Policy::compile(&limit.name, quota),
        })
        .zip(&limit.quotas)
        .map(|(policy, quota)| match cost_terms::of(limit) {
            Some(terms) => policy.map(|policy| policy.with_costs(quota, terms)),
            None => policy,
        })
        .collect();
    let cost = limit.cost.as_ref().map(|settings| {
        let before = before.and_then(|before| before.cost.as_deref());
        let cost = CostPlan::bind(&limit.name, settings, metrics, before);
        Arc::new(cost)
    });
    Ok(LimitRule {
        cost,
        shared: None,
        name: limit.name.clone(),
        place,
        key: KeyParts::new(&limit.name, limit.key.clone()),
        buckets,
        policies: policies
            .map_err(|error| PlanError::Unfit(format!("limit `{}`: {error}", limit.name)))?,
        exceptions: ConfigExceptions::of(limit),
        algorithm: algorithm.name,
        holds_slots: limit.algorithm.holds_slots(),
        max_delay_ns: match limit.over {
            Over::Reject => 0,
            Over::Delay { max_delay } => u64::try_from(max_delay.as_nanos()).unwrap_or(u64::MAX),
        },
        settings: limit.clone(),
        metrics: metrics.limit(&limit.name),
        runtime_overrides: runtime_overrides.on(&limit.name),
        dominant_key: LogOnce::default(),
    })
}

/// Whether the limit charges an estimate on arrival, and settles it later.
fn reserves(limit: &config::LimitSettings) -> bool {
    let cost = limit.cost.as_ref();
    cost.is_some_and(|cost| !cost.source.is_known_on_arrival())
}

/// Maps each quota to the old quota of the same tier or override, else to the old default.
fn tiers_before(before: &config::LimitSettings, after: &config::LimitSettings) -> Vec<usize> {
    let mut was = vec![0; after.quotas.len()];
    for (name, place) in &after.tiers {
        let same = before.tiers.iter().find(|(other, _)| other == name);
        was[*place] = same.map_or(0, |(_, place)| *place);
    }
    for exception in &after.overrides {
        let same = before
            .overrides
            .iter()
            .find(|other| other.target == exception.target);
        if let (Effect::Quota(place), Some(Effect::Quota(then))) =
            (exception.effect, same.map(|same| same.effect))
        {
            was[place] = then;
        }
    }
    was
}

/// The limit as shared with other gateways. `before` is the number of shared quotas bound so far.
fn bind_shared(
    limit: &config::LimitSettings,
    region_share: f64,
    before: usize,
    metrics: &Metrics,
) -> Option<Arc<SharedLimit>> {
    let shared = limit.shared?;
    let algorithm = limit.algorithm.record().shared;
    // A limit that is charged after the response takes nothing on arrival.
    let ahead = shared.sync == Sync::Lease && (limit.count_status.is_empty() || reserves(limit));
    let terms = limit.quotas.iter().map(|quota| {
        let (amount, burst) = (quota.amount.get(), quota.burst.get());
        let terms = match algorithm {
            SharedMethod::Slots => LeaseTerms::slots(amount, ahead),
            _ => LeaseTerms::new(algorithm, amount, quota.period, burst, ahead),
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
