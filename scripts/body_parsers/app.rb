# Every way in which Sinatra and Rack applications, and Rails on top of Rack, read a field: started by scripts/body-parsers.
require 'sinatra/base'
require 'json'
require 'webrick'

class App < Sinatra::Base
  set :environment, :production
  set :show_exceptions, false
  set :raise_errors, false
  read = lambda do |*|
    field = request.path.split('/').last
    outer, inner = field.split('.')
    body = request.body
    body.rewind
    raw = body.read
    body.rewind
    inside = lambda do |found|
      next nil unless found.is_a?(Hash)
      nested = found[outer]
      [found[field], nested.is_a?(Hash) && inner ? nested[inner] : nil]
    end
    seen = {}
    seen['params'] = (inside.call(params) rescue nil)
    seen['request.POST'] = (inside.call(request.POST) rescue nil)
    seen['JSON.parse'] = (inside.call(JSON.parse(raw)) rescue nil)
    seen['parse_nested_query'] = (inside.call(Rack::Utils.parse_nested_query(raw)) rescue nil)
    clean = ->(value) { case value when Array then value.map(&clean) when Hash then value.transform_values(&clean) when String then value.dup.force_encoding('UTF-8').scrub else value.nil? ? nil : value.to_s end }
    content_type 'application/json'
    JSON.generate(seen.transform_values(&clean))
  end
  %i[get post put].each { |verb| send(verb, '/*', &read) }
end

server = WEBrick::HTTPServer.new(Port: ARGV[0].to_i, BindAddress: '127.0.0.1', AccessLog: [], Logger: WEBrick::Log.new(File::NULL))
begin
  require 'rack/handler/webrick'
  server.mount('/', Rack::Handler::WEBrick, App)
rescue LoadError
  require 'rackup/handler/webrick'
  server.mount('/', Rackup::Handler::WEBrick, App)
end
server.start
