//! The HTTP interface: routes, the rights of callers, and error responses.
//!
//! Each group of routes has a file. The OpenAPI document is made from the documentation of the handlers. Handlers turn
//! bodies into commands for the authority and replies into bodies; they decide nothing. Statistics, attach and simulation
//! go to the node, everything else to the authority.

mod admin;
mod browser;
mod caller;
mod events;
mod extract;
mod follow;
mod history;
mod holders;
mod leases;
pub(crate) mod metrics;
mod middleware;
mod pages;
mod pool;
mod pool_metrics;
mod problem;
mod statistics;
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

pub(crate) use browser::OwnNames;
pub(crate) use holders::HeldConnections;

/// The parts of the agent that handlers use.
pub(crate) struct AppState {
    /// The authority.
    pub authority: Authority,
    /// The node.
    pub node: Node,
    /// The events for streams.
    pub events: Arc<Events>,
    /// The configuration at the start.
    pub config: Arc<Config>,
    /// The names of this machine.
    pub own_names: OwnNames,
    /// The TCP port that the agent listens on.
    pub port: u16,
    /// Every route with its summary; set by the router.
    pub routes: Vec<(String, String)>,
    /// The counters.
    pub metrics: Arc<Metrics>,
    /// The connections that hold leases.
    pub held_connections: HeldConnections,
    /// The shutdown of the agent.
    pub shutdown: Shutdown,
    /// The id of this machine.
    pub node_id: String,
    /// The start of the agent.
    pub started: Instant,
}

type SharedState = Arc<AppState>;

/// The part of the OpenAPI document that belongs to no route.
#[derive(OpenApi)]
#[openapi(info(
    title = "gpupool",
    description = "Shares GPUs between people, programs and machines: statistics, and leases that are durable and fenced."
))]
struct ApiDocument;

/// Returns the router of all routes. A documentation page at the path of a route is an error.
pub(crate) fn router(mut app: AppState) -> Result<Router, AgentError> {
    let (router, mut document) = OpenApiRouter::with_openapi(ApiDocument::openapi())
        .routes(routes!(pages::root))
        .routes(routes!(statistics::stats))
        .routes(routes!(statistics::count))
        .routes(routes!(statistics::summary))
        .routes(routes!(statistics::history))
        .routes(routes!(statistics::health))
        .routes(routes!(statistics::config))
        .routes(routes!(leases::list, leases::create))
        .routes(routes!(follow::follow, leases::release))
        .routes(routes!(follow::follow_all))
        .routes(routes!(leases::renew))
        .routes(routes!(leases::confirm))
        .routes(routes!(holders::attach))
        .routes(routes!(holders::hold))
        .routes(routes!(admin::revoke))
        .routes(routes!(admin::cordon))
        .routes(routes!(admin::uncordon))
        .routes(routes!(admin::forget))
        .routes(routes!(pool::pool))
        .routes(routes!(pool::devices))
        .routes(routes!(history::history))
        .routes(routes!(history::usage))
        .routes(routes!(events::events))
        .routes(routes!(tokens::list, tokens::create))
        .routes(routes!(tokens::revoke))
        .routes(routes!(admin::list_faults, admin::fault))
        .routes(routes!(metrics::metrics))
        .split_for_parts();
    document.info.title = app.config.api.title.clone();
    document.info.version = env!("CARGO_PKG_VERSION").into();
    app.routes = route_summaries(&document, &app.config.api.api_prefix);
    let app = Arc::new(app);
    let (router, pages) = pages::add_documentation(router, document, &app.config.api)?;
    let prefix = &app.config.api.api_prefix;
    let pages = pages.iter().map(|path| format!("{prefix}{path}")).chain([prefix.clone()]);
    app.metrics.know_routes(app.routes.iter().map(|(route, _)| route.clone()).chain(pages));
    let router = match app.config.api.api_prefix.as_str() {
        "" => router,
        // The front page is served with and without a slash after the prefix.
        prefix => Router::new().nest(prefix, router).route(&format!("{prefix}/"), get(pages::root)),
    };
    let router = middleware::add(
        router.fallback(problem::unknown_route).method_not_allowed_fallback(problem::method_not_allowed),
        &app,
    )
    .with_state(app);
    Ok(router)
}

/// Returns each route with its summary.
fn route_summaries(document: &utoipa::openapi::OpenApi, prefix: &str) -> Vec<(String, String)> {
    let summary = |item: &utoipa::openapi::PathItem| {
        let operation = item.get.as_ref().or(item.post.as_ref()).or(item.delete.as_ref())?;
        operation.summary.clone()
    };
    let routes = document.paths.paths.iter();
    routes.map(|(path, item)| (format!("{prefix}{path}"), summary(item).unwrap_or_default())).collect()
}
