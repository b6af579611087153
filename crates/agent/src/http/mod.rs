//! The HTTP interface: routes, who may use them, and how errors look.
//!
//! A file for each group of routes. Every route is documented where it is written, and the OpenAPI document is made from
//! that. Handlers turn bodies into commands for the authority and answers into bodies; they decide nothing. Statistics,
//! attach and simulation go to the node, everything else to the authority.

mod access;
mod admin;
mod attach;
mod browser;
mod caller;
mod docs;
mod events;
mod follow;
mod history;
mod hold;
mod leases;
mod metrics;
mod pool;
mod problem;
mod read;
mod root;
mod simulate;
mod stats;
mod tokens;

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::routing::get;
use gpupool_config::Config;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::authority::Authority;
use crate::error::AgentError;
use crate::events::Events;
use crate::metrics::Metrics;
use crate::net::Shutdown;
use crate::node::Node;

pub use hold::HeldConnections;

/// What every handler may use.
pub struct App {
    /// The authority.
    pub authority: Authority,
    /// The node.
    pub node: Node,
    /// The events for streams.
    pub events: Arc<Events>,
    /// How the agent was set up.
    pub config: Arc<Config>,
    /// The port it listens on.
    pub port: u16,
    /// What can be asked, route by route; filled in by the router.
    pub routes: Vec<(String, String)>,
    /// What was counted.
    pub metrics: Arc<Metrics>,
    /// The connections that hold leases.
    pub held_connections: HeldConnections,
    /// Whether the agent is ending.
    pub shutdown: Shutdown,
    /// Identifies this machine.
    pub node_id: String,
    /// When the agent started.
    pub started: Instant,
}

type Shared = Arc<App>;

/// The part of the OpenAPI document that no route tells.
#[derive(OpenApi)]
#[openapi(info(
    title = "gpupool",
    description = "Shares GPUs between people, programs and machines: statistics, and leases that are durable and fenced."
))]
struct Described;

/// Everything the agent answers; refused where a page was set to be in the place of a route.
pub fn router(mut app: App) -> Result<Router, AgentError> {
    let (router, mut document) = OpenApiRouter::with_openapi(Described::openapi())
        .routes(routes!(root::root))
        .routes(routes!(stats::stats))
        .routes(routes!(stats::count))
        .routes(routes!(stats::summary))
        .routes(routes!(stats::history))
        .routes(routes!(stats::health))
        .routes(routes!(stats::config))
        .routes(routes!(leases::list, leases::create))
        .routes(routes!(follow::follow, leases::release))
        .routes(routes!(follow::follow_all))
        .routes(routes!(leases::renew))
        .routes(routes!(leases::confirm))
        .routes(routes!(attach::attach))
        .routes(routes!(hold::hold))
        .routes(routes!(admin::revoke))
        .routes(routes!(admin::cordon))
        .routes(routes!(admin::uncordon))
        .routes(routes!(pool::pool))
        .routes(routes!(pool::devices))
        .routes(routes!(history::history))
        .routes(routes!(history::usage))
        .routes(routes!(events::events))
        .routes(routes!(tokens::list, tokens::create))
        .routes(routes!(tokens::revoke))
        .routes(routes!(simulate::list, simulate::fault))
        .routes(routes!(metrics::metrics))
        .split_for_parts();
    document.info.title = app.config.api.title.clone();
    document.info.version = env!("CARGO_PKG_VERSION").into();
    app.routes = described(&document, &app.config.api.api_prefix);
    let app = Arc::new(app);
    let (router, pages) = docs::add(router, document, &app.config.api)?;
    let prefix = &app.config.api.api_prefix;
    let pages = pages.iter().map(|path| format!("{prefix}{path}")).chain([prefix.clone()]);
    app.metrics.know_routes(app.routes.iter().map(|(route, _)| route.clone()).chain(pages));
    let router = match app.config.api.api_prefix.as_str() {
        "" => router,
        // A prefix is the front door with and without a slash at its end.
        prefix => Router::new().nest(prefix, router).route(&format!("{prefix}/"), get(root::root)),
    };
    let router = access::add(
        router.fallback(problem::no_such_route).method_not_allowed_fallback(problem::not_that_method),
        &app,
    )
    .with_state(app);
    Ok(router)
}

/// Each route with what it is for.
fn described(document: &utoipa::openapi::OpenApi, prefix: &str) -> Vec<(String, String)> {
    let summary = |item: &utoipa::openapi::PathItem| {
        let operation = item.get.as_ref().or(item.post.as_ref()).or(item.delete.as_ref())?;
        operation.summary.clone()
    };
    let routes = document.paths.paths.iter();
    routes.map(|(path, item)| (format!("{prefix}{path}"), summary(item).unwrap_or_default())).collect()
}
