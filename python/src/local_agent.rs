//! The agent of this machine, which programs lease the GPUs of their workers from.

use gpupool_client::Endpoint;
use gpupool_client::local::LocalAgent;
use gpupool_config::{Flags, Inputs, Origin, Reader};

/// Finds it, as the environment and the configuration file say, or tells why there is none. `starts` is what a refusal says
/// is started on this machine.
pub(crate) async fn find(starts: &'static str) -> Result<LocalAgent, String> {
    let told = |error: &dyn std::fmt::Display| error.to_string();
    let inputs = Inputs::here(Flags::default(), None, Reader::Client).map_err(|error| told(&error))?;
    let loaded = gpupool_config::load(&inputs).map_err(|error| told(&error))?;
    let servers = loaded.servers();
    let urls = if servers.origin == Origin::Default { &[][..] } else { &servers.urls[..] };
    let named: Result<Vec<Endpoint>, _> = urls.iter().map(|url| Endpoint::choose(None, Some(url), None)).collect();
    let named = named.map_err(|error| told(&error))?;
    LocalAgent::find(named, &loaded, starts).await.map_err(|error| told(&error))
}
