//! The wanted paths of a JSON value, as a tree of names.

use memchr::memmem::Finder;

use super::{counters::Counter, decimal::Decimal};

/// Longer names match no path.
pub(super) const MAX_NAME_BYTES: usize = 64;

/// The most names in one configured path.
pub(super) const MAX_PATH_NAMES: usize = 16;

/// The index of a node in the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeIndex(u8);

#[derive(Clone, Debug)]
struct PathNode {
    name: Box<[u8]>,
    parent: u8,
    children: Vec<NodeIndex>,
    counter: Option<Counter>,
}

/// Paths to counters. Created once per configuration, shared by all answers.
#[derive(Clone, Debug)]
pub(super) struct UsagePaths {
    /// The root comes first.
    nodes: Vec<PathNode>,
    scale: Decimal,
    /// Text that every value with a wanted number contains; `None` if there is no single such text.
    needle: Option<Finder<'static>>,
    wants_model: bool,
}

impl UsagePaths {
    pub(super) const ROOT: NodeIndex = NodeIndex(0);

    /// `None` if a path is empty, too long, or has a name that cannot be compared.
    pub(super) fn new(
        paths: &[(&str, Counter)],
        needle: Option<&str>,
        scale: Decimal,
    ) -> Option<UsagePaths> {
        let mut tree = UsagePaths {
            nodes: vec![PathNode {
                name: Box::default(),
                parent: 0,
                children: Vec::new(),
                counter: None,
            }],
            scale,
            needle: needle.map(|needle| Finder::new(needle.as_bytes()).into_owned()),
            wants_model: paths.iter().any(|(_, counter)| *counter == Counter::Model),
        };
        paths
            .iter()
            .all(|(path, counter)| tree.insert(path, *counter).is_some())
            .then_some(tree)
    }

    fn insert(&mut self, path: &str, counter: Counter) -> Option<()> {
        let mut node = UsagePaths::ROOT;
        for (index, name) in path.split('.').enumerate() {
            let is_fit = !name.is_empty()
                && name.len() <= MAX_NAME_BYTES
                && index < MAX_PATH_NAMES
                && !name.contains(|c: char| c == '"' || c == '\\' || c.is_control());
            if !is_fit {
                return None;
            }
            let known = self.child(node, name.as_bytes());
            node = match known {
                Some(child) => child,
                None => {
                    let child = NodeIndex(u8::try_from(self.nodes.len()).ok()?);
                    let parent = self.nodes.get_mut(usize::from(node.0))?;
                    parent.children.push(child);
                    self.nodes.push(PathNode {
                        name: name.as_bytes().into(),
                        parent: node.0,
                        children: Vec::new(),
                        counter: None,
                    });
                    child
                }
            };
        }
        self.nodes.get_mut(usize::from(node.0))?.counter = Some(counter);
        Some(())
    }

    fn node(&self, node: NodeIndex) -> Option<&PathNode> {
        self.nodes.get(usize::from(node.0))
    }

    pub(super) fn child(&self, node: NodeIndex, name: &[u8]) -> Option<NodeIndex> {
        let children = &self.node(node)?.children;
        let is_named = |child: &&NodeIndex| {
            let child = self.node(**child);
            child.is_some_and(|child| *child.name == *name)
        };
        children.iter().find(is_named).copied()
    }

    pub(super) fn parent(&self, node: NodeIndex) -> NodeIndex {
        self.node(node)
            .map_or(UsagePaths::ROOT, |node| NodeIndex(node.parent))
    }

    pub(super) fn has_children(&self, node: NodeIndex) -> bool {
        self.node(node)
            .is_some_and(|node| !node.children.is_empty())
    }

    pub(super) fn counter(&self, node: NodeIndex) -> Option<Counter> {
        self.node(node)?.counter
    }

    pub(super) fn scale(&self) -> Decimal {
        self.scale
    }

    pub(super) fn wants_model(&self) -> bool {
        self.wants_model
    }

    /// Whether this text may contain a counter. Text without any wanted name contains none,
    /// wherever it ends.
    pub(super) fn may_contain_counter(&self, text: &[u8]) -> bool {
        self.needle
            .as_ref()
            .is_none_or(|needle| needle.find(text).is_some())
    }
}
