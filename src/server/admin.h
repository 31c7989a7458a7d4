// The dashboard's page and its API under /admin (JSON, same access rule as the OpenAI routes).
#pragma once

namespace ddtree {

class HttpServer;
class Service;

// Called once before HttpServer::start(). Both outlive the routes.
void register_admin_routes(HttpServer& server, Service& service);

}  // namespace ddtree
