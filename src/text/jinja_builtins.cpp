// Attribute and item access, the functions that every template has, and the binding of arguments.
#include "text/jinja_builtins.h"

#include <ctime>

#include "text/jinja_render.h"
#include "text/jinja_strings.h"

namespace ddtree::jinja {

Bound::Bound(std::string_view function, Args& args, std::initializer_list<std::string_view> names, size_t required)
    : function_(function), values_(names.size()), given_(names.size(), false) {
  if (args.positional.size() > names.size())
    throw TypeError(function_ + "() takes at most " + std::to_string(names.size()) + " arguments (" +
                    std::to_string(args.positional.size()) + " given)");
  for (size_t i = 0; i < args.positional.size(); ++i) {
    values_[i] = args.positional[i];
    given_[i] = true;
  }
  for (const auto& [key, value] : args.named) {
    size_t i = 0;
    while (i < names.size() && names.begin()[i] != key) ++i;
    if (i == names.size()) throw TypeError(function_ + "() got an unexpected keyword argument '" + key + "'");
    if (given_[i]) throw TypeError(function_ + "() got multiple values for argument '" + key + "'");
    values_[i] = value;
    given_[i] = true;
  }
  for (size_t i = 0; i < required; ++i)
    if (!given_[i]) throw TypeError(function_ + "() missing required argument: '" + std::string(names.begin()[i]) + "'");
}

Int Bound::integer(size_t i, Int otherwise) const {
  if (!given_[i] || values_[i].is(Kind::kNone)) return otherwise;
  return checked_int(values_[i], function_.c_str());
}

std::string Bound::text(size_t i, std::string otherwise) const {
  if (!given_[i]) return otherwise;
  if (values_[i].is_undefined()) fail_undefined(values_[i]);
  if (!values_[i].is_string()) throw TypeError(function_ + "(): expected a string, not '" + type_name(values_[i]) + "'");
  return values_[i].text();
}

namespace {

Value missing_attribute(const Value& object, const Value& key) {
  const std::string owner = object.is(Kind::kNone) ? "None" : std::string(type_name(object)) + " object";
  if (key.is_string()) return Value::undefined("'" + owner + "' has no attribute " + repr_string(key.text()));
  return Value::undefined("'" + owner + "' has no element " + repr(key));
}

Value unsafe(const Value& object, const std::string& name) {
  return Value::undefined("access to attribute " + repr_string(name) + " of '" + type_name(object) + "' object is unsafe.");
}

bool one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  for (const auto n : names)
    if (n == name) return true;
  return false;
}

Value list_method(const Value& self, const std::string& name) {
  if (name == "count")
    return Value::function(name, [self](Interpreter&, Args& args) {
      const Bound b("count", args, {"value"}, 1);
      Int n = 0;
      for (const Value& v : iterate(self)) n += equal(v, b[0]);
      return Value::integer(n);
    });
  if (name == "index")
    return Value::function(name, [self](Interpreter&, Args& args) {
      const Bound b("index", args, {"value", "start", "stop"}, 1);
      const List all = iterate(self);
      const Int size = static_cast<Int>(all.size());
      const auto bound = [&](Int i) { return i < 0 ? (i + size < 0 ? Int{0} : i + size) : i; };
      for (Int i = bound(b.integer(1, 0)), end = bound(b.integer(2, size)); i < end && i < size; ++i)
        if (equal(all[static_cast<size_t>(i)], b[0])) return Value::integer(i);
      throw ValueError(repr(b[0]) + " is not in list");
    });
  if (name == "copy" && self.is(Kind::kList))
    return Value::function(name, [self](Interpreter&, Args&) { return Value::list(self.items()); });
  return Value();
}

Value dict_method(const Value& self, const std::string& name) {
  if (name == "get")
    return Value::function(name, [self](Interpreter&, Args& args) {
      if (!args.named.empty()) throw TypeError("get() takes no keyword arguments");
      const Bound b("get", args, {"key", "default"}, 1);
      const Value* hit = self.dict().find(b[0]);
      return hit ? *hit : b.get(1, Value::none());
    });
  const auto view = [&](const char* type, auto pick) {
    return Value::function(name, [self, type, pick](Interpreter& in, Args& args) {
      const Bound b(type, args, {});
      List out;
      for (const auto& entry : self.dict().entries()) out.push_back(pick(entry));
      in.step(out.size());
      return Value::view(type, std::move(out));
    });
  };
  if (name == "items") return view("dict_items", [](const auto& e) { return Value::tuple({e.first, e.second}); });
  if (name == "keys") return view("dict_keys", [](const auto& e) { return e.first; });
  if (name == "values") return view("dict_values", [](const auto& e) { return e.second; });
  if (name == "copy")
    return Value::function(name, [self](Interpreter&, Args& args) {
      const Bound b("copy", args, {});
      return Value::dict(std::make_shared<DictData>(self.dict()));
    });
  return Value();
}

Value loop_attribute(const Value& self, const std::string& name) {
  auto& loop = self.data<LoopData>();
  if (name == "index0") return Value::integer(loop.index0);
  if (name == "index") return Value::integer(loop.index0 + 1);
  if (name == "first") return Value::boolean(loop.index0 == 0);
  if (name == "last") return Value::boolean(!loop.peek());
  if (name == "length") return Value::integer(loop.length());
  if (name == "revindex") return Value::integer(loop.length() - loop.index0);
  if (name == "revindex0") return Value::integer(loop.length() - loop.index0 - 1);
  if (name == "depth") return Value::integer(loop.depth0 + 1);
  if (name == "depth0") return Value::integer(loop.depth0);
  if (name == "previtem") return loop.index0 == 0 ? Value::undefined("there is no previous item") : loop.before;
  if (name == "nextitem") return loop.peek() ? *loop.after : Value::undefined("there is no next item");
  if (name == "cycle")
    return Value::function(name, [self](Interpreter&, Args& args) {
      if (args.positional.empty()) throw TypeError("no items for cycling given");
      return args.positional[static_cast<size_t>(self.data<LoopData>().index0 % static_cast<Int>(args.positional.size()))];
    });
  if (name == "changed")
    return Value::function(name, [self](Interpreter&, Args& args) {
      auto& last = self.data<LoopData>().last_changed;
      const bool changed = !last || !equal(Value::tuple(*last), Value::tuple(args.positional));
      if (changed) last = args.positional;
      return Value::boolean(changed);
    });
  return Value();
}

Value cycler_attribute(const Value& self, const std::string& name) {
  auto& data = self.data<CyclerData>();
  if (name == "current") return data.items[data.at];
  if (name == "next")
    return Value::function(name, [self](Interpreter&, Args&) {
      auto& c = self.data<CyclerData>();
      const Value out = c.items[c.at];
      c.at = (c.at + 1) % c.items.size();
      return out;
    });
  if (name == "reset")
    return Value::function(name, [self](Interpreter&, Args&) {
      self.data<CyclerData>().at = 0;
      return Value::none();
    });
  if (name == "items") return Value::tuple(data.items);
  if (name == "pos") return Value::integer(static_cast<Int>(data.at));
  return Value();
}

// What getattr() finds; undefined without a message if there is nothing.
Value own_attribute(const Value& object, const std::string& name) {
  switch (object.kind()) {
    case Kind::kString: return string_method(object, name);
    case Kind::kDict:
      if (one_of(name, {"clear", "pop", "popitem", "setdefault", "update"})) return unsafe(object, name);
      return dict_method(object, name);
    case Kind::kList:
      if (one_of(name, {"append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove"})) return unsafe(object, name);
      return list_method(object, name);
    case Kind::kTuple:
      if (object.data<ListData>().grouped) {
        if (name == "grouper") return object.items()[0];
        if (name == "list") return object.items()[1];
      }
      return list_method(object, name);
    case Kind::kRange: {
      const auto& r = object.data<RangeData>();
      if (name == "start") return Value::integer(r.start);
      if (name == "stop") return Value::integer(r.stop);
      if (name == "step") return Value::integer(r.step);
      return list_method(object, name);
    }
    case Kind::kNamespace: {
      const Value* member = object.data<NamespaceData>().members.find(std::string_view(name));
      return member ? *member : Value();
    }
    case Kind::kLoop: return loop_attribute(object, name);
    case Kind::kCycler: return cycler_attribute(object, name);
    case Kind::kJoiner:
      if (name == "sep") return Value::string(object.data<JoinerData>().separator);
      if (name == "used") return Value::boolean(object.data<JoinerData>().used);
      return Value();
    case Kind::kMacro: {
      const auto& macro = object.data<MacroData>();
      if (name == "name") return macro.name.empty() ? Value::none() : Value::string(macro.name);
      if (name == "catch_kwargs") return Value::boolean(macro.definition->uses_kwargs);
      if (name == "catch_varargs") return Value::boolean(macro.definition->uses_varargs);
      if (name == "caller") return Value::boolean(macro.definition->uses_caller);
      return Value();
    }
    case Kind::kInt:
    case Kind::kBool:
    case Kind::kFloat:
      if (name == "real") return object.is(Kind::kBool) ? Value::integer(object.as_int()) : object;
      if (name == "is_integer" && object.is(Kind::kFloat))
        return Value::function(name, [object](Interpreter&, Args&) {
          return Value::boolean(repr_real(object.as_real()).find("inf") == std::string::npos &&
                                object.as_real() == static_cast<double>(static_cast<Int>(object.as_real())));
        });
      return Value();
    default: return Value();
  }
}

}  // namespace

Value attribute(Interpreter& in, const Value& object, const std::string& name) {
  in.step();
  if (object.is_undefined()) fail_undefined(object);
  const Value own = own_attribute(object, name);
  if (!own.is_undefined() || own.identity() ||
      (object.is(Kind::kNamespace) && object.data<NamespaceData>().members.find(std::string_view(name))))
    return own;
  if (object.is(Kind::kDict))
    if (const Value* hit = object.dict().find(std::string_view(name))) return *hit;
  if (name.size() > 4 && name.starts_with("__") && name.ends_with("__")) return unsafe(object, name);
  return missing_attribute(object, Value::string(name));
}

Value item(Interpreter& in, const Value& object, const Value& key) {
  in.step();
  switch (object.kind()) {
    case Kind::kUndefined: fail_undefined(object);
    case Kind::kDict:
      try {
        if (const Value* hit = object.dict().find(key)) return *hit;
      } catch (const TypeError&) {  // an unhashable key is as good as an absent one
      }
      break;
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kRange:
      if (key.is_integral()) {
        const Int size = length(object);
        Int i = key.as_int();
        if (i < 0) i += size;
        if (i < 0 || i >= size) return missing_attribute(object, key);
        if (object.is_string()) {
          std::string one;
          if (is_ascii(object.text())) one = object.text()[static_cast<size_t>(i)];
          else append_utf8(one, decode(object.text())[static_cast<size_t>(i)]);
          return Value::string(std::move(one), object.markup());
        }
        if (object.is(Kind::kRange)) return Value::integer(object.data<RangeData>().start + i * object.data<RangeData>().step);
        return object.items()[static_cast<size_t>(i)];
      }
      break;
    default: break;
  }
  if (key.is_string()) {
    const Value own = own_attribute(object, key.text());
    if (!own.is_undefined() || own.identity()) return own;
  }
  return missing_attribute(object, key);
}

namespace {

Value make_range(Interpreter&, Args& args) {
  if (!args.named.empty()) throw TypeError("range() takes no keyword arguments");
  if (args.positional.empty() || args.positional.size() > 3)
    throw TypeError("range expected 1 to 3 arguments, got " + std::to_string(args.positional.size()));
  RangeData r{0, 0, 1};
  const auto get = [&](size_t i) { return checked_int(args.positional[i], "range()'s argument"); };
  if (args.positional.size() == 1) {
    r.stop = get(0);
  } else {
    r.start = get(0);
    r.stop = get(1);
    if (args.positional.size() == 3) r.step = get(2);
  }
  if (r.step == 0) throw ValueError("range() arg 3 must not be zero");
  const Int bound = static_cast<Int>(1) << 62;
  if (r.start > bound || r.start < -bound || r.stop > bound || r.stop < -bound || r.step > bound || r.step < -bound)
    throw Error("range(): a bound is too large");
  if (r.size() > 100000) throw Error("Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).");
  return Value::range(r);
}

// Shared by dict() and namespace(): a mapping or pairs, then keywords.
DictData members_of(Interpreter& in, const char* name, Args& args) {
  if (args.positional.size() > 1)
    throw TypeError(std::string(name) + " expected at most 1 argument, got " + std::to_string(args.positional.size()));
  DictData out;
  if (!args.positional.empty()) {
    const Value& from = args.positional[0];
    if (from.is(Kind::kDict)) {
      out = from.dict();
    } else {
      for (const Value& pair : in.iterate_counted(from)) {
        const List two = iterate(pair);
        if (two.size() != 2)
          throw ValueError("dictionary update sequence element has length " + std::to_string(two.size()) + "; 2 is required");
        out.set(two[0], two[1]);
      }
    }
  }
  for (const auto& [key, value] : args.named) out.set(key, value);
  return out;
}

Value strftime_now(Interpreter&, Args& args) {
  const Bound b("strftime_now", args, {"format"}, 1);
  const std::string format = b.text(0, "");
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  if (format.empty()) return Value::string("");
  std::string out(format.size() * 4 + 256, '\0');
  const size_t n = std::strftime(out.data(), out.size(), format.c_str(), &local);
  if (n == 0) throw Error("strftime_now(): the date is too long");
  out.resize(n);
  return Value::string(std::move(out));
}

}  // namespace

const DictData& builtin_functions() {
  static const DictData all = [] {
    DictData out;
    const auto add = [&](const char* name, Value (*f)(Interpreter&, Args&)) { out.set(name, Value::function(name, f)); };
    add("range", make_range);
    add("dict", [](Interpreter& in, Args& args) { return Value::dict(std::make_shared<DictData>(members_of(in, "dict", args))); });
    add("namespace", [](Interpreter& in, Args& args) { return in.new_namespace(members_of(in, "namespace", args)); });
    add("cycler", [](Interpreter&, Args& args) {
      if (!args.named.empty()) throw TypeError("cycler() takes no keyword arguments");
      if (args.positional.empty()) throw Error("at least one item has to be provided");
      return Value::object(Kind::kCycler, std::make_shared<CyclerData>(CyclerData{args.positional, 0}));
    });
    add("joiner", [](Interpreter&, Args& args) {
      const Bound b("joiner", args, {"sep"});
      return Value::object(Kind::kJoiner, std::make_shared<JoinerData>(JoinerData{b.text(0, ", "), false}));
    });
    add("lipsum", [](Interpreter&, Args&) -> Value {
      throw Error("lipsum() makes random text, which a prompt must not depend on; it is not provided");
    });
    add("raise_exception", [](Interpreter&, Args& args) -> Value {
      const Bound b("raise_exception", args, {"message"}, 1);
      throw Error(Failure::Kind::kRaised, str(b[0]));
    });
    add("strftime_now", strftime_now);
    return out;
  }();
  return all;
}

}  // namespace ddtree::jinja
