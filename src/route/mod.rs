//! Core: which policy applies to a request.
//!
//! Among the routes that match, the most specific decides, by host, then path, then method: an exact host over `*.example.com`
//! (the longest first) over any host; a literal segment over a parameter over a rest, from left to right; a route that names the method
//! over one for any method. A route that matches but for its method does not end the search: a less specific one may take the request.
//! Two routes that none of this sets apart are an error when the table is built, so the order in the file never matters.

pub mod host;
pub mod path;
pub mod pattern;
mod tree;

use std::{collections::HashMap, fmt, ops::ControlFlow};

use http::{HeaderValue, Method};

pub use pattern::Pattern;

use host::HostPattern;
use pattern::Segment;
use tree::{Methods, Tree};

/// Every route, ready to be looked up.
#[derive(Debug, Default)]
pub struct RouteTable {
    exact: HashMap<Box<str>, Tree>,
    below: HashMap<Box<str>, Tree>,
    any: Tree,
    /// By route: the names in its path.
    names: Vec<Box<[Name]>>,
}

/// A parameter of a route's path.
#[derive(Debug)]
struct Name {
    text: Box<str>,
    /// How many segments stand before it.
    position: usize,
    /// It takes the rest of the path.
    is_rest: bool,
}

/// A route that cannot be part of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteError {
    /// Which pattern, by its place in the list.
    pub index: usize,
    /// The earlier pattern with which it collides.
    pub other: Option<usize>,
    /// Which part of the pattern.
    pub part: Part,
    /// What is wrong, as a clause without capital or full stop.
    pub problem: String,
    /// How to mend it.
    pub hint: String,
}

/// A part of a [`Pattern`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// One of its hosts, by its place in the list.
    Host(usize),
    /// Its path.
    Path,
    /// One of its methods, by its place in the list.
    Method(usize),
}

/// What a lookup found.
#[derive(Debug, PartialEq, Eq)]
pub enum Found<'t, 'p> {
    /// The pattern that decides, by its place in the list, and what its parameters stand for.
    Route(usize, Params<'t, 'p>),
    /// Routes match, but none for this method (405); the value is for `Allow`. The one outcome that allocates.
    WrongMethod(HeaderValue),
    /// No route matches (404).
    None,
}

/// What the parameters of a route's path stand for in one request. Costs nothing until asked.
#[derive(Clone, Copy)]
pub struct Params<'t, 'p> {
    names: &'t [Name],
    key_path: &'p str,
}

impl RouteTable {
    /// Checks and indexes patterns. Fails with every problem of every pattern. 10,000 patterns take some tens of milliseconds.
    pub fn build(patterns: &[Pattern]) -> Result<RouteTable, Vec<RouteError>> {
        let mut table = RouteTable::default();
        let mut errors = Vec::new();
        for (index, pattern) in patterns.iter().enumerate() {
            table.add(index, pattern, patterns, &mut errors);
        }
        if errors.is_empty() {
            Ok(table)
        } else {
            Err(errors)
        }
    }

    fn add(
        &mut self,
        index: usize,
        pattern: &Pattern,
        patterns: &[Pattern],
        errors: &mut Vec<RouteError>,
    ) {
        let complaints = errors.len();
        let mut wrong = |part, (problem, hint)| {
            errors.push(RouteError {
                index,
                other: None,
                part,
                problem,
                hint,
            })
        };
        let segments = pattern::parse_path(&pattern.path).unwrap_or_else(|complaint| {
            wrong(Part::Path, complaint);
            Vec::new()
        });
        for (place, method) in pattern.methods.iter().enumerate() {
            if pattern.methods[..place].contains(method) {
                wrong(
                    Part::Method(place),
                    (
                        format!("method `{method}` is listed twice"),
                        "list it once".to_owned(),
                    ),
                );
            }
            pattern::check_method(method)
                .unwrap_or_else(|complaint| wrong(Part::Method(place), complaint));
        }
        let mut hosts = Vec::with_capacity(pattern.hosts.len());
        for (place, text) in pattern.hosts.iter().enumerate() {
            match HostPattern::parse(text) {
                Ok(host) if hosts.contains(&host) => wrong(
                    Part::Host(place),
                    (
                        format!("host `{text}` is listed twice"),
                        "list it once".to_owned(),
                    ),
                ),
                Ok(host) => hosts.push(host),
                Err(complaint) => wrong(Part::Host(place), complaint),
            }
        }
        self.names.push(names(&segments));
        if errors.len() > complaints {
            return;
        }

        let mut collisions = Vec::new();
        if hosts.is_empty() {
            collisions.extend(
                self.any
                    .insert(&segments, &pattern.methods, index)
                    .err()
                    .unwrap_or_default(),
            );
        }
        for host in hosts {
            let tree = match host {
                HostPattern::Exact(name) => self.exact.entry(name).or_default(),
                HostPattern::Below(name) => self.below.entry(name).or_default(),
            };
            collisions.extend(
                tree.insert(&segments, &pattern.methods, index)
                    .err()
                    .unwrap_or_default(),
            );
        }
        collisions.sort_unstable();
        collisions.dedup();
        errors.extend(collisions.into_iter().map(|other| RouteError {
            index,
            other: Some(other),
            part: Part::Path,
            problem: format!("path `{}` matches the same requests as path `{}` of an earlier route", pattern.path, patterns[other].path),
            hint: "nothing decides between the two: give them different hosts, paths or methods, or remove one".to_owned(),
        }));
    }

    /// The route of a request.
    ///
    /// `host` is what [`host::normalise`] gives, `key_path` is [`NormalPath::key`](path::NormalPath::key).
    pub fn find<'t, 'p>(&'t self, host: &str, key_path: &'p str, method: &Method) -> Found<'t, 'p> {
        let host = host::for_lookup(host);
        let mut matched = false;
        let route = self.visit(host, key_path, |methods| {
            matched = true;
            methods
                .find(method)
                .map_or(ControlFlow::Continue(()), ControlFlow::Break)
        });
        match route {
            ControlFlow::Break(route) => Found::Route(
                route,
                Params {
                    names: &self.names[route],
                    key_path,
                },
            ),
            ControlFlow::Continue(()) if matched => {
                Found::WrongMethod(self.allowed(host, key_path))
            }
            ControlFlow::Continue(()) => Found::None,
        }
    }

    /// What the parameters of a route that [`find`](Self::find) found stand for, given the same path again.
    pub fn params<'t, 'p>(&'t self, route: usize, key_path: &'p str) -> Params<'t, 'p> {
        let names = &self.names[route];
        Params { names, key_path }
    }

    /// Every route for this host and path, the most specific first, whatever its methods. For explaining; allocates.
    pub fn matching(&self, host: &str, key_path: &str) -> Vec<usize> {
        let mut routes = Vec::new();
        let _: ControlFlow<()> = self.visit(host::for_lookup(host), key_path, |methods| {
            routes.extend(methods.routes());
            ControlFlow::Continue(())
        });
        // one that names several methods stands there several times in a row
        routes.dedup();
        routes
    }

    /// Every method that some matching route names, for `Allow` (RFC 9110 §10.2.1).
    fn allowed(&self, host: &str, key_path: &str) -> HeaderValue {
        let mut names: Vec<&str> = Vec::new();
        let _: ControlFlow<()> = self.visit(host, key_path, |methods| {
            names.extend(methods.names());
            ControlFlow::Continue(())
        });
        names.sort_unstable();
        names.dedup();
        HeaderValue::try_from(names.join(", "))
            .expect("methods are tokens, which are visible ASCII")
    }

    /// Shows the methods of every matching host and path, the most specific first, to `visit` until it breaks.
    fn visit<'t, B>(
        &'t self,
        host: &str,
        key_path: &str,
        mut visit: impl FnMut(&'t Methods) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        if let Some(tree) = self.exact.get(host) {
            tree.visit(key_path, &mut visit)?;
        }
        if !self.below.is_empty() {
            for tree in host::parents(host).filter_map(|parent| self.below.get(parent)) {
                tree.visit(key_path, &mut visit)?;
            }
        }
        self.any.visit(key_path, &mut visit)
    }
}

fn names(segments: &[Segment<'_>]) -> Box<[Name]> {
    let name = |(position, segment): (usize, &Segment<'_>)| match *segment {
        Segment::Literal(_) => None,
        Segment::Parameter(text) => Some(Name {
            text: text.into(),
            position,
            is_rest: false,
        }),
        Segment::Rest(text) => Some(Name {
            text: text.into(),
            position,
            is_rest: true,
        }),
    };
    segments.iter().enumerate().filter_map(name).collect()
}

impl<'t, 'p> Params<'t, 'p> {
    /// What the parameter stands for: one segment, or for `{*rest}` all that is left without its leading slash (perhaps
    /// nothing). `None` when the route has no such parameter.
    pub fn get(&self, name: &str) -> Option<&'p str> {
        self.names
            .iter()
            .find(|known| &*known.text == name)
            .map(|known| self.value(known))
    }

    /// Every parameter with what it stands for, from left to right.
    pub fn iter(&self) -> impl Iterator<Item = (&'t str, &'p str)> {
        self.names
            .iter()
            .map(|name| (&*name.text, self.value(name)))
    }

    fn value(&self, name: &Name) -> &'p str {
        // the n-th segment stands after the n-th slash, counted from zero
        let start = self
            .key_path
            .match_indices('/')
            .nth(name.position)
            .map_or(self.key_path.len(), |(slash, _)| slash + 1);
        let left = &self.key_path[start..];
        match left.find('/') {
            Some(end) if !name.is_rest => &left[..end],
            _ => left,
        }
    }
}

impl PartialEq for Params<'_, '_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Params<'_, '_> {}

impl fmt::Debug for Params<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests;
